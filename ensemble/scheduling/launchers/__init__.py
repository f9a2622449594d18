"""Start workers by launchers: a module or a folder for each."""
