package dispatcher

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// closedData makes the data directory of a stopped dispatcher, with 2,000 pending messages and an
// audience with one member.
func closedData(t *testing.T) (dir, table, members string) {
	t.Helper()
	dir = t.TempDir()
	store, err := openClosed(dir)
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/crm"}))
	rnd := rand.NewChaCha8([32]byte{}) // Not compressible, so that the table has many blocks.
	for i := range 10 {
		var all []queue.Message
		for j := range 200 {
			body := make([]byte, 500)
			_, _ = rnd.Read(body)
			all = append(all, queue.Message{Source: "shop/web", ID: fmt.Sprint(i, "-", j), Type: "track", AcceptedAt: time.Now(),
				Body: fmt.Appendf(nil, `{"x":%q}`, hex.EncodeToString(body))})
		}
		_, err := store.Append(t.Context(), all)
		must(err)
	}
	must(store.PutMetaDurable("audience/shop/vip", []byte(`{"version":1,"done":{"namespace":"shop","name":"vip","sync":"1"}}`)))
	must(store.Close())
	tables, err := filepath.Glob(filepath.Join(dir, backup.QueueFolder, "*.sst"))
	if err != nil || len(tables) == 0 {
		t.Fatalf("tables: got %v, %v, want one", tables, err)
	}
	name := sha256.Sum256([]byte("shop/vip"))
	members = filepath.Join(dir, backup.MembersFolder, hex.EncodeToString(name[:16]), "members-1")
	text := []byte("PHAUD001m\x02u1\x00\x00\x01")
	text = binary.LittleEndian.AppendUint32(text, crc32.Checksum(text, crc32.MakeTable(crc32.Castagnoli)))
	must(os.MkdirAll(filepath.Dir(members), 0o700))
	must(os.WriteFile(members, text, 0o600))
	return dir, tables[0], members
}

func flipMiddle(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)/2] ^= 1
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// One flipped bit of a table that no start reads, or of a file of members, fails a backup and the
// check of a restored copy.
func TestBackupOfDamagedData(t *testing.T) {
	for _, damaged := range []string{"none", "table", "members"} {
		t.Run(damaged, func(t *testing.T) {
			dir, table, members := closedData(t)
			want := ""
			switch damaged {
			case "table":
				flipMiddle(t, table)
				want = filepath.Base(table)
			case "members":
				flipMiddle(t, members)
				want = "audience shop/vip"
			}
			wantError := func(fact string, err error) {
				t.Helper()
				if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
					t.Errorf("%s: got %v, want an error with %q", fact, err, want)
				}
			}
			var archive bytes.Buffer
			wantError("backup", BackupStopped(t.Context(), dir, "v1", &archive))
			if damaged != "none" && archive.Len() > 0 {
				t.Errorf("archive: got %d bytes, want none", archive.Len())
			}
			copied := t.TempDir()
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			_, _, err := VerifyCopy(t.Context(), copied)
			wantError("check of a copy", err)
			if damaged != "none" {
				return
			}
			extracted := t.TempDir()
			if _, err := backup.Extract(&archive, extracted, func(string) (int64, error) { return math.MaxInt64, nil }); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(extracted, backup.QueueFolder, "LOCK")); err == nil {
				t.Error("the archive has a lock file, want none")
			}
			lanes, letters, err := VerifyCopy(t.Context(), extracted)
			if lanes != 1 || letters != 0 || err != nil {
				t.Errorf("check of the extracted backup: got %d lanes, %d dead letters, %v, want 1 lane", lanes, letters, err)
			}
		})
	}
}

// An interrupt ends a backup of a stopped dispatcher, also while it checks the copy, and the check
// of a restored copy.
func TestBackupIsInterrupted(t *testing.T) {
	dir, _, _ := closedData(t)
	interrupted := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(interrupted)
	if err := BackupStopped(ctx, dir, "v1", io.Discard); !errors.Is(err, interrupted) {
		t.Errorf("backup: got %v, want %v", err, interrupted)
	}
	// During the check of the copy, which is not damage.
	store, err := openClosed(dir)
	if err != nil {
		t.Fatal(err)
	}
	late, cancelLate := context.WithCancelCause(t.Context())
	_, err = takeBackup(late, dir, store, func() func() { return func() { cancelLate(interrupted) } }, "v1", io.Discard)
	if !errors.Is(err, interrupted) || strings.Contains(err.Error(), "repair") {
		t.Errorf("backup that is interrupted after the checkpoint: got %v, want %v only", err, interrupted)
	}
	if err := store.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "backup.tmp")); err == nil {
		t.Error("the work folder exists after the backup")
	}
	if _, _, err := VerifyCopy(ctx, dir); !errors.Is(err, interrupted) {
		t.Errorf("check of a copy: got %v, want %v", err, interrupted)
	}
}
