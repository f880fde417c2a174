"""What is said of plans, scores and receipts: explanation, verdict, sweep and the page."""
