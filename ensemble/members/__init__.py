"""Define the kinds of members: a folder for each, behind one interface."""
