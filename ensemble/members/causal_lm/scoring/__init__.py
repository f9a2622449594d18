"""What a worker computes of a language model: prompts, and the labels behind them."""
