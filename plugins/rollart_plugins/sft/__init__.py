"""Supervised fine-tuning: ``rollart sft``."""
