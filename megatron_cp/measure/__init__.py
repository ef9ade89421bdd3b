"""What a cluster can do, measured: rates of attention, bandwidth of its levels, and the profile that plans read."""
