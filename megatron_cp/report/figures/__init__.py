"""Pictures of masks, plans, lengths and timelines, which the pages share."""
