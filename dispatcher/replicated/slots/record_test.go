package slots

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

func TestRecordRoundTrip(t *testing.T) {
	want := header{kind: kindBatches, session: pebblestore.Session{1, 2}, epoch: 3, number: 4, first: 5, last: 6}
	record := make([]byte, headerBytes)
	for _, batch := range []string{"one", "two"} {
		record = appendBatch(record, []byte(batch))
	}
	want.seal(record)
	got, payload, err := decodeRecord(record)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("header: got %+v, want %+v", got, want)
	}
	var batches []string
	for len(payload) > 0 {
		var batch []byte
		if batch, payload, err = cutBatch(payload); err != nil {
			t.Fatal(err)
		}
		batches = append(batches, string(batch))
	}
	if diff := cmp.Diff([]string{"one", "two"}, batches); diff != "" {
		t.Errorf("batches (-want +got):\n%s", diff)
	}
}

// Every changed bit and every shorter record is found.
func TestDamagedRecord(t *testing.T) {
	record := appendBatch(make([]byte, headerBytes), []byte("batch"))
	header{kind: kindBatches, first: 1, last: 1}.seal(record)
	for bit := range 8 * len(record) {
		damaged := bytes.Clone(record)
		damaged[bit/8] ^= 1 << (bit % 8)
		if _, _, err := decodeRecord(damaged); err == nil || errors.Is(err, pebblestore.ErrNewerFormat) {
			t.Errorf("record with bit %d changed: got error %v, want one other than %v", bit, err, pebblestore.ErrNewerFormat)
		}
	}
	for n := range record {
		if _, _, err := decodeRecord(record[:n]); err == nil {
			t.Errorf("record of %d bytes: got no error, want one", n)
		}
	}
}

func TestCutBatchOfWrongLength(t *testing.T) {
	for _, payload := range [][]byte{{5, 'a'}, {0x80}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}} {
		if _, _, err := cutBatch(payload); err == nil {
			t.Errorf("payload %x: got no error, want one", payload)
		}
	}
}
