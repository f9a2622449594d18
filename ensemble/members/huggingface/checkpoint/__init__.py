"""What can be known of checkpoints and adapters from their files, without loading them."""
