"""Audio and images, measured: branches side by side (`side_by_side`), and questions about an invoice (`invoice`)."""
