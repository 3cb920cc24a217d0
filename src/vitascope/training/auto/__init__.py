"""Choose the settings of a run from its images, from the pretrained weights at hand, and from the machine."""
