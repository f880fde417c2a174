"""What every decision shares: terms of a budget, rules, and plans from decisions. No torch."""
