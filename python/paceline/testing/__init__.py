"""Help for tests of programs that use paceline: `paceline.testing.faults` makes devices fail on purpose."""
