package integrity

import (
	"context"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
	blocks "github.com/cockroachdb/pebble/v2/sstable/block"
	"github.com/cockroachdb/pebble/v2/sstable/block/blockkind"
	"github.com/cockroachdb/pebble/v2/sstable/colblk"
)

// TableBlock is a block of a table, and an upper bound of its keys.
type TableBlock struct {
	blocks.Handle
	Last []byte
}

// TableBlocks lists the blocks of a table.
func TableBlocks(ctx context.Context, r *sstable.Reader) (all []TableBlock, err error) {
	layout, err := r.Layout()
	if err != nil {
		return nil, err
	}
	for _, at := range layout.Index {
		h, err := r.BlockReader().Read(ctx, blocks.NoReadEnv, nil, at, blockkind.Index, colblk.InitIndexBlockMetadata)
		if err != nil {
			return nil, err
		}
		var it colblk.IndexIter
		if err := it.Init(pebble.DefaultComparer, h.BlockData(), blocks.NoTransforms); err != nil {
			h.Release()
			return nil, err
		}
		for ok := it.First(); ok; ok = it.Next() {
			data, err := it.BlockHandleWithProperties()
			if err != nil {
				h.Release()
				return nil, err
			}
			all = append(all, TableBlock{data.Handle, slices.Clone(it.Separator())})
		}
		h.Release()
	}
	return all, nil
}
