"""The launcher ``ray`` on a real cluster of this machine: several raylets, each with its own folder and GPUs."""
