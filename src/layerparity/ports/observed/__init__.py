"""What is seen inside a stage while it runs, and how it was measured that nothing else is."""
