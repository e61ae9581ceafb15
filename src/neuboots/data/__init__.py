"""What happens to images before a net sees them; see `neuboots.data.corruptions`."""
