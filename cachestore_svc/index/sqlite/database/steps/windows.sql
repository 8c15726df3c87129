-- Layers of a window have blocks of their own: a block's place is its group and its start.
ALTER TABLE blobs ADD COLUMN window INTEGER NOT NULL DEFAULT 0;
