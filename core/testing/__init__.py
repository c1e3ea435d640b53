"""For authors of plugins: the conformance kit, and fakes of model, device and clock."""
