"""Logits processors: penalties, bias, banned words, minimum length."""
