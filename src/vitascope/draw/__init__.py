"""Numbers -> pictures: one look, one palette, captions; nothing here knows what a model is."""
