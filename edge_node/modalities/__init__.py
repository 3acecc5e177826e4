"""Sound, pictures and files in requests: when the encoders of this box run for a generation (`part_encoders`), pictures
as soft tokens (`projectors`), and `/v1/audio/*` (`api`, `audio`, `speaker`)."""
