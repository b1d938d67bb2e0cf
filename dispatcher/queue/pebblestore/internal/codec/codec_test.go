package codec

import (
	"encoding/hex"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// A record without a trace is identical to a record of release 0.1, so that messages can be read
// after an upgrade and after a rollback.
func TestRecordIsThatOfTheFirstRelease(t *testing.T) {
	const first = "0000018bcfe5687b" + "0000000000000007" + "02" + "026d31" + "0145" + "01" + "0873686f702f63726d" + "00" + "7b7d"
	m := queue.Message{Source: "shop/web", ID: "m1", Type: "track", Event: "E", AcceptedAt: time.UnixMilli(1_700_000_000_123), Skip: []string{"shop/crm"}, Body: []byte("{}")}
	if got := hex.EncodeToString(AppendRecord(nil, &m, 7)); got != first {
		t.Errorf("stored as %s, by the first release as %s", got, first)
	}
	v, err := hex.DecodeString(first)
	if err != nil {
		t.Fatal(err)
	}
	var r Record
	if err := r.Decode(v); err != nil || string(r.ID) != "m1" || Types[r.Code] != "track" || string(r.Event) != "E" || len(r.Trace) != 0 ||
		string(r.Body) != "{}" {
		t.Errorf("%+v, %v", r, err)
	}
}

// A release without long numbers reads their mark as one more destination to skip, with a name
// that no destination has.
func TestLongNumbersAreAnEntryOfSkip(t *testing.T) {
	m := queue.Message{Source: "shop/web", ID: "m1", Type: "track", Event: "E", AcceptedAt: time.UnixMilli(1_700_000_000_123), Skip: []string{"shop/crm"}, Body: []byte("[1e400]")}
	plain := m
	plain.Skip = []string{"#", "shop/crm"}
	m.LongNumbers = true
	stored := AppendRecord(nil, &m, 7)
	if diff := cmp.Diff(hex.EncodeToString(AppendRecord(nil, &plain, 7)), hex.EncodeToString(stored)); diff != "" {
		t.Errorf("stored record (-want +got):\n%s", diff)
	}
	var r Record
	if err := r.Decode(stored); err != nil || !r.Long {
		t.Errorf("long = %t, %v, want true", r.Long, err)
	}
	for destination, want := range map[string]Verdict{"shop/crm": Filtered, "shop/mail": Wanted} {
		if got := r.Verdict(queue.LaneID{Source: "shop/web", Destination: destination}); got != want {
			t.Errorf("verdict for %s = %d, want %d", destination, got, want)
		}
	}
	m.LongNumbers = false
	if err := r.Decode(AppendRecord(nil, &m, 7)); err != nil || r.Long {
		t.Errorf("long = %t of an unmarked record, %v, want false", r.Long, err)
	}
}

func TestRecordSizeIsExact(t *testing.T) {
	for _, m := range []queue.Message{
		{},
		{ID: "m1", Type: "track", Event: "E", Body: []byte("{}")},
		{ID: "m1", Type: "track", LongNumbers: true, Body: []byte("[1e400]")},
		{ID: "m1", Type: "track", LongNumbers: true, Skip: make([]string, 127)},
		{ID: "m1", Type: "a new type", TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Skip: []string{"a", "b"},
			Only: "c", Body: make([]byte, 300)},
	} {
		if size, got := RecordSize(&m), len(AppendRecord(nil, &m, 1<<40)); size != got {
			t.Errorf("a record of %d bytes has the size %d", got, size)
		}
	}
}
