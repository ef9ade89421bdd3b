"""What no plan can beat, and what a published scheme cannot beat."""
