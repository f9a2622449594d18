"""Provide what runs in the processes of trainings."""
