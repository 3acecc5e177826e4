"""Sound and pictures, measured: branches side by side (`side_by_side`), questions about an
invoice (`invoice`), and about instrument panels (`panels`)."""
