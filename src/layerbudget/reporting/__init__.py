"""Sentences on plans, scores and receipts: explanation, verdict, sweep and the page."""
