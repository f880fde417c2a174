"""Shared by all decisions: terms of a budget, rules, and plans from decisions. No torch."""
