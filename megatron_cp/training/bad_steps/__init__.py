"""Steps whose numbers are bad: found on all ranks together, computed again, traced to a document, and not applied."""
