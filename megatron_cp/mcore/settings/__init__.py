"""What Megatron's arguments ask for: read once here, or refused."""
