"""What a plan costs on named hardware: machines, row sizes, seconds, memory."""
