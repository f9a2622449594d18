"""Find each member's fastest settings on this machine that keep its probabilities, by trying them."""
