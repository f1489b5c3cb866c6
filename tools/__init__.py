"""Beside the trainer: Hugging Face import and export, and the corpus of data.py packages."""
