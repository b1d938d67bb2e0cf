package admission

import (
	"math"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// syncReserve is the disk space below the high-water mark that audience syncs leave to live calls;
// on a small disk 5 %.
const syncReserve = 1 << 30

// DiskForSync reports whether an audience sync may write to the disk now.
func (g *Gate) DiskForSync() bool {
	left, total, ok := g.DiskLeft()
	if !ok {
		return !g.Store.Full() // The store checks the disk itself.
	}
	return left > min(syncReserve, 0.05*total) && !g.Store.Full()
}

// DiskLeft returns the bytes that can be written until the disk reaches the high-water mark, and the
// disk's size without the blocks that the file system reserves. ok is false if they are unknown.
func (g *Gate) DiskLeft() (left, total float64, ok bool) {
	disk, err := vfs.Default.GetDiskUsage(g.DataDir)
	if err != nil {
		return 0, 0, false
	}
	used := float64(disk.UsedBytes)
	total = used + float64(disk.AvailBytes)
	return g.HighWater*total - used, total, true
}

// RoomForSync reports whether there is space for calls of an audience sync of a Source ("namespace/name"): they
// may fill half of the share of its namespace, or of its quota.
func (g *Gate) RoomForSync(source string) bool {
	used, most := g.Store.Share(source)
	return g.DiskForSync() && (most == 0 || used <= most/2)
}

// RoomForDeadLetters is a quarter of the disk in bytes, so that dead letters alone never fill it.
func (g *Gate) RoomForDeadLetters() int64 {
	if total := g.Storage().TotalBytes; total > 0 {
		return total / 4
	}
	return math.MaxInt64 // The size of the disk is unknown.
}

// Storage returns the state of the disk for reports.
func (g *Gate) Storage() adminapi.StorageReport {
	s := adminapi.StorageReport{UsedBytes: g.Store.DiskBytes(), Pressure: g.Store.Full()}
	if disk, err := vfs.Default.GetDiskUsage(g.DataDir); err == nil {
		s.FreeBytes, s.TotalBytes = int64(disk.AvailBytes), int64(disk.TotalBytes)
	}
	return s
}
