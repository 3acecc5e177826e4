"""What a policy would have done with recorded requests: `replay`, its `report`, and the steps behind it."""
