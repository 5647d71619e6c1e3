"""Where weights and tokenizers come from and go to."""
