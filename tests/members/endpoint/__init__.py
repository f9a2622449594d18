"""Tests of members behind a server."""
