"""Networks, data and references that several tests share."""
