"""How sparse every block becomes: plan, apply, files."""
