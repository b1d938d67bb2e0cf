package audience

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/test/check"
)

// of returns a sorted stream of "id", "id=value" and "-id".
func of(texts ...string) stream {
	records := make([]record, len(texts))
	for i, text := range texts {
		r := record{op: opMember}
		if rest, ok := strings.CutPrefix(text, "-"); ok {
			r.op, text = opRemove, rest
		}
		id, value, _ := strings.Cut(text, "=")
		r.id, r.value = []byte(id), []byte(value)
		records[i] = r
	}
	slices.SortFunc(records, func(a, b record) int { return bytes.Compare(a.id, b.id) })
	return func() (record, error) {
		if len(records) == 0 {
			return record{}, io.EOF
		}
		r := records[0]
		records = records[1:]
		return r, nil
	}
}

func text(r record) string {
	s := string(r.op) + ":" + string(r.id)
	if len(r.value) > 0 {
		s += "=" + string(r.value)
	}
	return s
}

func collect(list *[]string) func(record) error {
	return func(r record) error { *list = append(*list, text(r)); return nil }
}

func TestDiff(t *testing.T) {
	for _, c := range []struct {
		name             string
		before, now      stream
		full, resend     bool
		members, changes []string
		counts           adminapi.SyncCounts
	}{
		{"first", of(), of("a", "b"), true, false, []string{"m:a", "m:b"}, []string{"j:a", "j:b"}, adminapi.SyncCounts{Members: 2, Added: 2}},
		{"same", of("a", "b"), of("a", "b"), true, false, []string{"m:a", "m:b"}, nil, adminapi.SyncCounts{Before: 2, Members: 2}},
		{"all kinds", of("a=1", "b=2", "c=3"), of("b=2", "c=4", "d=5"), true, false, []string{"m:b=2", "m:c=4", "m:d=5"},
			[]string{"l:a=1", "c:c=4", "j:d=5"}, adminapi.SyncCounts{Before: 3, Members: 3, Added: 1, Removed: 1, Changed: 1}},
		{"all removed", of("a", "b"), of(), true, false, nil, []string{"l:a", "l:b"}, adminapi.SyncCounts{Before: 2, Removed: 2}},
		{"increment", of("a", "b"), of("-a", "-x", "c", "b"), false, false, []string{"m:b", "m:c"}, []string{"l:a", "j:c"},
			adminapi.SyncCounts{Before: 2, Members: 2, Added: 1, Removed: 1}},
		{"empty increment", of("a"), of(), false, false, []string{"m:a"}, nil, adminapi.SyncCounts{Before: 1, Members: 1}},
		{"prefixes", of("a", "aa"), of("aa", "aaa"), true, false, []string{"m:aa", "m:aaa"}, []string{"l:a", "j:aaa"},
			adminapi.SyncCounts{Before: 2, Members: 2, Added: 1, Removed: 1}},
		{"resent", of("a", "b", "c=1"), of("b", "c=2", "d"), true, true, []string{"m:b", "m:c=2", "m:d"}, []string{"l:a", "s:b", "c:c=2", "j:d"},
			adminapi.SyncCounts{Before: 3, Members: 3, Added: 1, Removed: 1, Changed: 1, Resent: 1}},
		{"increment resent", of("a", "b"), of("b", "-x"), false, true, []string{"m:a", "m:b"}, []string{"s:b"},
			adminapi.SyncCounts{Before: 2, Members: 2, Resent: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var members, changes []string
			counts, err := diff(c.before, c.now, c.full, c.resend, collect(&members), collect(&changes))
			if err != nil {
				t.Fatal(err)
			}
			if d := gocmp.Diff(c.members, members); d != "" {
				t.Errorf("members (-want +got):\n%s", d)
			}
			if d := gocmp.Diff(c.changes, changes); d != "" {
				t.Errorf("changes (-want +got):\n%s", d)
			}
			check.Equal(t, "counts", counts, c.counts)
		})
	}
}

// A stream with an error must not look like one that ended: the missing users would be
// reported as removed.
func TestDiffFailsWithItsStreams(t *testing.T) {
	broken := errors.New("broken")
	breaks := func(s stream, after int) stream {
		return func() (record, error) {
			if after--; after < 0 {
				return record{}, broken
			}
			return s()
		}
	}
	for after := range 3 {
		for _, both := range [][2]stream{{breaks(of("a", "b", "c"), after), of("a", "b", "c")},
			{of("a", "b", "c"), breaks(of("a", "b", "c"), after)}} {
			var members, changes []string
			if _, err := diff(both[0], both[1], true, false, collect(&members), collect(&changes)); !errors.Is(err, broken) {
				t.Errorf("stream with an error after %d records: got error %v, want %v", after, err, broken)
			}
		}
	}
}

// Sorting and diffing random input gives the same result as maps.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		before, now := map[string]string{}, map[string]string{}
		sorted := func(m map[string]string, repeat bool) stream {
			s := newSorter(vfs.Default, t.TempDir(), 1<<30, unwatched)
			s.maxArena, s.maxSpans, s.maxRuns = 64+rnd.IntN(200), 1+rnd.IntN(9), 2+rnd.IntN(3)
			n := rnd.IntN(120)
			for range n {
				id := fmt.Sprintf("u%d", rnd.IntN(40))
				if _, twice := m[id]; twice && !repeat {
					continue
				}
				m[id] = fmt.Sprint(rnd.IntN(3)) // The last value counts.
				if err := s.add(record{op: opMember, id: []byte(id), value: []byte(m[id])}); err != nil {
					t.Fatal(err)
				}
			}
			records, done, err := s.sorted()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(done)
			return records
		}
		var wantMembers, wantChanges, members, changes []string
		b, n := sorted(before, true), sorted(now, true)
		for _, id := range slices.Sorted(maps.Keys(now)) {
			wantMembers = append(wantMembers, "m:"+id+"="+now[id])
		}
		all := maps.Clone(before)
		maps.Copy(all, now)
		for _, id := range slices.Sorted(maps.Keys(all)) {
			old, wasMember := before[id]
			value, isMember := now[id]
			switch {
			case !isMember:
				wantChanges = append(wantChanges, "l:"+id+"="+old)
			case !wasMember:
				wantChanges = append(wantChanges, "j:"+id+"="+value)
			case old != value:
				wantChanges = append(wantChanges, "c:"+id+"="+value)
			}
		}
		if _, err := diff(b, n, true, false, collect(&members), collect(&changes)); err != nil {
			t.Fatalf("diff of seed %d: got error %v, want none", seed, err)
		}
		if d := gocmp.Diff(wantMembers, members); d != "" {
			t.Fatalf("seed %d: members (-want +got):\n%s", seed, d)
		}
		if d := gocmp.Diff(wantChanges, changes); d != "" {
			t.Fatalf("seed %d: changes (-want +got):\n%s", seed, d)
		}
	}
}

// Reading a file with any flipped bit, or truncated anywhere, fails without a panic.
func TestDamagedFilesAreRejected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	w, err := create(vfs.Default, path)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"a", "bb", "ccc"} {
		if err := w.add(record{op: opMember, id: []byte(id), value: []byte("1.5")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.finish(true); err != nil {
		t.Fatal(err)
	}
	read := func() (n int, err error) {
		r, err := open(vfs.Default, path)
		if err != nil {
			return 0, err
		}
		defer r.close()
		for ; ; n++ {
			if _, err := r.next(); err != nil {
				return n, err
			}
		}
	}
	if n, err := read(); n != 3 || !errors.Is(err, io.EOF) {
		t.Fatalf("read of the undamaged file: got %d records and error %v, want 3 records and EOF", n, err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	try := func(what string, content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := read(); !errors.Is(err, errDamaged) {
			t.Errorf("read of a file with %s: got error %v, want %v", what, err, errDamaged)
		}
	}
	for i := range good {
		try(fmt.Sprintf("its first %d bytes only", i), good[:i])
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			try(fmt.Sprintf("bit %d of byte %d flipped", bit, i), bad)
		}
	}
}

func unwatched(s stream) stream { return s }

func TestSorterIsBounded(t *testing.T) {
	s := newSorter(vfs.Default, t.TempDir(), 1000, unwatched)
	s.maxArena = 100
	var err error
	for i := 0; err == nil && i < 10_000; i++ {
		err = s.add(record{op: opMember, id: fmt.Appendf(nil, "user-%d", i)})
	}
	check.ErrorIs(t, "add beyond the bound", err, errTooMuch)
}

// The merge of runs into longer runs also reads through the given wrapper.
func TestMergeOfRunsCanBeStopped(t *testing.T) {
	full := errors.New("full")
	s := newSorter(vfs.Default, t.TempDir(), 1<<30, func(stream) stream {
		return func() (record, error) { return record{}, full }
	})
	s.maxSpans, s.maxRuns = 1, 2
	for i := range 3 {
		if err := s.add(record{op: opMember, id: fmt.Append(nil, i)}); err != nil {
			t.Fatal(err)
		}
	}
	_, _, err := s.sorted()
	check.ErrorIs(t, "sorted", err, full)
}

func TestLines(t *testing.T) {
	const audience, trait = liveconfig.KindAudience, liveconfig.KindComputedTrait
	long := strings.Repeat("x", MaxUserIDBytes+1)
	for _, c := range []struct {
		name, kind string
		full       bool
		in         string
		want       []string
		code       string
		line       int64
	}{
		{"members", audience, true, "{\"userId\":\"a\"}\n\n {\"userId\":\"b\"} \r\n{\"userId\":\"ü\"}", []string{"m:a", "m:b", "m:ü"}, "", 0},
		{"values", trait, true, `{"userId":"a","value":1.50}` + "\n" + `{"value":"x","userId":"b"}` + "\n" + `{"userId":"c","value":[1, true]}`,
			[]string{"m:a=1.5", `m:b="x"`, "m:c=[1,true]"}, "", 0},
		{"increment", audience, false, `{"userId":"a","member":false}` + "\n" + `{"userId":"b","member":true}` + "\n" + `{"userId":"c"}`,
			[]string{"r:a", "m:b", "m:c"}, "", 0},
		{"empty", audience, true, "\n\n", nil, "", 0},
		{"byte order mark", audience, true, "\ufeff{\"userId\":\"a\"}\n", []string{"m:a"}, "", 0},
		{"only a byte order mark", audience, true, "\ufeff\n", nil, "", 0},
		{"one user with two spellings", audience, true, `{"userId":"\u0061\/"}` + "\n" + `{"user\u0049d":"a/"}`, []string{"m:a/", "m:a/"}, "", 0},
		{"users that look alike", audience, true,
			`{"userId":"é"}` + "\n" + `{"userId":"e\u0301"}` + "\n" + `{"userId":"É"}` + "\n" + `{"userId":" é"}`,
			[]string{"m:é", "m:e\u0301", "m:É", "m: é"}, "", 0},
		{"one value with many spellings", trait, true, strings.ReplaceAll(`{"userId":"a","value":1}#{"userId":"a","value":1.0}#{"userId":"a","value":10e-1}#{"userId":"b","value":-0}#{"userId":"c","value":["\u0061", {"b":1,"b":2}]}`, "#", "\r\n"), []string{"m:a=1", "m:a=1", "m:a=1", "m:b=0", `m:c=["a",{"b":2}]`}, "", 0},
		{"values that differ", trait, true,
			`{"userId":"a","value":"1"}` + "\n" + `{"userId":"a","value":9007199254740993}` + "\n" + `{"userId":"a","value":9007199254740992}`,
			[]string{`m:a="1"`, "m:a=9007199254740993", "m:a=9007199254740992"}, "", 0},
		{"of equal names the last counts", trait, true, `{"userId":"x","value":1,"userId":"a","value":2}`, []string{"m:a=2"}, "", 0},
		{"lines that end in CR", audience, true, "{\"userId\":\"a\"}\r{\"userId\":\"b\"}", nil, "invalid_json", 1},
		{"another case", audience, true, `{"userid":"a"}`, nil, "unknown_field", 1},
		{"two cases", audience, true, `{"userId":"a","UserID":"b"}`, nil, "unknown_field", 1},
		{"null member", audience, false, `{"userId":"a","member":null}`, nil, "invalid_field", 1},
		{"no fields of the previous line", trait, true, `{"userId":"a","value":1}` + "\n" + `{"userId":"b"}`, []string{"m:a=1"}, "no_value", 2},
		{"not json", audience, true, "{\"userId\":\"a\"}\nhello\n", []string{"m:a"}, "invalid_json", 2},
		{"truncated", audience, true, "{\"userId\":\"a\"}\n{\"userId\":\"b", []string{"m:a"}, "invalid_json", 2},
		{"two on a line", audience, true, `{"userId":"a"}{"userId":"b"}`, nil, "invalid_json", 1},
		{"array", audience, true, `["a"]`, nil, "not_an_object", 1},
		{"a string", audience, true, `"a"`, nil, "not_an_object", 1},
		{"null", audience, true, `null`, nil, "no_user_id", 1},
		{"no id", audience, true, `{}`, nil, "no_user_id", 1},
		{"empty id", audience, true, `{"userId":""}`, nil, "no_user_id", 1},
		{"null id", audience, true, `{"userId":null}`, nil, "invalid_field", 1},
		{"number id", audience, true, `{"userId":7}`, nil, "invalid_field", 1},
		{"long id", audience, true, `{"userId":"` + long + `"}`, nil, "invalid_field", 1},
		{"half a character", audience, true, `{"userId":"\ud800"}`, nil, "invalid_field", 1},
		{"not utf-8", audience, true, "{\"userId\":\"\xff\"}", nil, "invalid_json", 1},
		{"unknown field", audience, true, `{"userId":"a","email":"secret@example.com"}`, nil, "unknown_field", 1},
		{"value of an audience", audience, true, `{"userId":"a","value":true}`, nil, "invalid_field", 1},
		{"trait without value", trait, true, `{"userId":"a"}`, nil, "no_value", 1},
		{"object value", trait, true, `{"userId":"a","value":{}}`, nil, "invalid_field", 1},
		{"null value", trait, true, `{"userId":"a","value":null}`, nil, "invalid_field", 1},
		{"deep value", trait, true, `{"userId":"a","value":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, nil,
			"invalid_field", 1},
		{"member in a snapshot", audience, true, `{"userId":"a","member":false}`, nil, "unknown_field", 1},
		{"member of a wrong type", audience, false, `{"userId":"a","member":"no"}`, nil, "invalid_field", 1},
		{"removal with a value", trait, false, `{"userId":"a","member":false,"value":1}`, nil, "invalid_field", 1},
		{"long line", audience, true, `{"userId":"` + strings.Repeat("x", 1<<20), nil, "line_too_long", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := newLines(strings.NewReader(c.in), c.kind, c.full)
			var got []string
			var err error
			for {
				var r record
				if r, err = in.next(); err != nil {
					break
				}
				got = append(got, text(r))
			}
			if d := gocmp.Diff(c.want, got); d != "" {
				t.Errorf("records (-want +got):\n%s", d)
			}
			refusal, _ := errors.AsType[*admission.Refusal](err)
			switch {
			case c.code == "" && !errors.Is(err, io.EOF):
				t.Errorf("last error: got %v, want EOF", err)
			case c.code != "" && (refusal == nil || refusal.Code != c.code || refusal.Line != c.line):
				t.Errorf("last error: got %v, want %s in line %d", err, c.code, c.line)
			case refusal != nil && strings.Contains(refusal.Message, "example.com"):
				t.Errorf("the message contains user data: %s", refusal.Message)
			}
		})
	}
}

// endless is a line that never ends.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	e.read += len(p)
	return len(p), nil
}

func TestLineOfAnyLengthIsBounded(t *testing.T) {
	in := &endless{}
	_, err := newLines(in, liveconfig.KindAudience, true).next()
	if refusal, _ := errors.AsType[*admission.Refusal](err); refusal == nil || refusal.Code != "line_too_long" {
		t.Errorf("endless line: got error %v, want line_too_long", err)
	}
	if in.read > 4*MaxLineBytes {
		t.Errorf("bytes that were read: got %d, want at most %d", in.read, 4*MaxLineBytes)
	}
}
