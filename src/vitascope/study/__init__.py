"""Many runs -> what a setting does, and how sure we are."""
