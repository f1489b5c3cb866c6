"""The trainer's library."""
