"""What a member can be: one folder for each kind, behind one interface."""
