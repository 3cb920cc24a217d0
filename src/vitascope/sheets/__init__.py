"""The five sheets of coursework that Vitascope was asked for, run and answered."""
