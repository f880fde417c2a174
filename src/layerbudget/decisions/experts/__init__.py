"""Mixtures of LoRA experts: how many every block gets, and the PEFT method that holds them."""
