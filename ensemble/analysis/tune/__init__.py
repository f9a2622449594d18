"""Which settings of each member are fastest on this machine and still give its probabilities, by trying them."""
