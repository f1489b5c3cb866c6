"""Commands beside the trainer: Hugging Face import and export, installing Transformer Engine."""
