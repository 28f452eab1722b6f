"""Updates as bytes: header, packing and codec."""
