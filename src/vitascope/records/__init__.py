"""Records of finished runs, and the tables and model cards generated from them."""
