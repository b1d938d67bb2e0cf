package standalone

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/test/check"
)

// metaStore is a store of records.
type metaStore map[string][]byte

func (m metaStore) AllMeta() (map[string][]byte, error) { return maps.Clone(m), nil }

func (m metaStore) PutMeta(name string, value []byte) error {
	if value == nil {
		delete(m, name)
	} else {
		m[name] = value
	}
	return nil
}

// standby is the store of a process with its own folder.
type standby struct {
	t   *testing.T
	dir string
	*store
}

func newStandby(t *testing.T, files map[string]string) *standby {
	t.Helper()
	p := &standby{t, t.TempDir(), newStore()}
	for name, text := range files {
		put(t, p.dir, name, text)
	}
	return p
}

// own reads the records, loads the folder, and writes the records, as a new owner does.
func (p *standby) own(records metaStore, now time.Time) {
	p.t.Helper()
	check.NoError(p.t, "read the records", p.readRecords(records))
	p.reload(records, now)
}

func (p *standby) reload(records metaStore, now time.Time) {
	p.t.Helper()
	marks, err := manifests(p.dir)
	check.NoError(p.t, "list the manifests", err)
	p.load(marks, now)
	check.NoError(p.t, "write the records", p.writeRecords(records))
}

func (p *standby) object(kind, name string) *stored {
	p.t.Helper()
	o := p.objects[id{kind, "default", name}]
	if o == nil {
		p.t.Fatalf("%s %s: got no object", kind, name)
	}
	return o
}

const forget = "apiVersion: posthorn.dev/v1beta1\nkind: DeletionRequest\nmetadata: {name: forget}\nspec: {userID: u1}\n"

// The next owner of a replicated log has the same objects as the last one, and not new ones.
func TestRecordsOfTheLastOwner(t *testing.T) {
	files := map[string]string{"secret.yaml": secret, "web.yaml": webSource, "crm.yaml": webDestination, "forget.yaml": forget}
	records, begin := metaStore{"deletion/x": []byte("{}")}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	first := newStandby(t, files)
	first.own(records, begin)
	put(t, first.dir, "web.yaml", strings.Replace(webSource, "spec: {", "spec: {suspend: true, ", 1))
	request := first.object("DeletionRequest", "forget").resource.(*v1beta1.DeletionRequest)
	start := metav1.NewTime(begin)
	request.Status.StartTime = &start
	first.reload(records, begin.Add(time.Minute))
	for name, value := range records {
		if strings.Contains(string(value), "canary-key") {
			t.Errorf("record %s has a Secret: %s", name, value)
		}
	}

	// The Source has another change in the folder of the next owner, and one of its files cannot be read.
	files["web.yaml"] = strings.Replace(webSource, "spec: {", "spec: {rateLimit: {callsPerSecond: 9}, ", 1)
	files["crm.yaml"] = "{"
	next := newStandby(t, files)
	next.own(records, begin.Add(time.Hour))
	for _, o := range []id{{"DeletionRequest", "default", "forget"}, {"Source", "default", "web"}} {
		check.Equal(t, "UID of "+o.String(), next.objects[o].resource.GetUID(), first.objects[o].resource.GetUID())
	}
	check.Equal(t, "generation of the Source with another spec", next.object("Source", "web").Generation, 3)
	got := next.object("DeletionRequest", "forget").resource.(*v1beta1.DeletionRequest)
	check.Equal(t, "start of the run", got.Status.StartTime != nil && got.Status.StartTime.Time.Equal(begin), true)
	version := func(p *standby) string {
		return p.snapshots(compile.Policy{})["default"].Secrets["web-key"].Version
	}
	check.Equal(t, "version of the Secret", version(next), version(first))
	put(t, next.dir, "crm.yaml", webDestination)
	next.reload(records, begin.Add(2*time.Hour))
	crm := id{"WebhookDestination", "default", "crm"}
	check.Equal(t, "UID of the destination whose file was not valid at first", next.objects[crm].resource.GetUID(),
		first.objects[crm].resource.GetUID())

	// An object that is deleted and created again is a new one, with the same process and with another one.
	put(t, next.dir, "forget.yaml", noObjects)
	next.reload(records, begin.Add(3*time.Hour))
	check.Equal(t, "the record of a deleted object exists", records[id{"DeletionRequest", "default", "forget"}.recordName()] != nil, false)
	put(t, next.dir, "forget.yaml", forget)
	next.reload(records, begin.Add(4*time.Hour))
	again := next.object("DeletionRequest", "forget").resource
	check.Equal(t, "the UID of an object that was created again differs", again.GetUID() != got.GetUID(), true)
	files["forget.yaml"] = strings.Replace(forget, "u1", "u2", 1)
	third := newStandby(t, files)
	third.own(records, begin.Add(5*time.Hour))
	other := third.object("DeletionRequest", "forget").resource
	check.Equal(t, "the UID of a request for another user differs", other.GetUID() != again.GetUID(), true)

	check.NoError(t, "forget the records", ForgetRecords(records))
	check.Equal(t, "values without the records", len(records), 1)
}

// The records are newer than the state file of a process that was the owner before.
func TestRecordsAreNewerThanTheState(t *testing.T) {
	files := map[string]string{"secret.yaml": secret, "web.yaml": webSource, "forget.yaml": forget}
	records, begin := metaStore{}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	before := newStandby(t, files)
	before.own(records, begin)
	path := t.TempDir() + "/manifests.json"
	check.NoError(t, "save the state", before.save(path))

	// Another process ends the run, and creates the Source again.
	name := id{"DeletionRequest", "default", "forget"}.recordName()
	var r record
	check.NoError(t, "decode a record", json.Unmarshal(records[name], &r))
	r.Status = json.RawMessage(`{"startTime":"2026-01-02T03:05:00Z"}`)
	records[name], _ = json.Marshal(r)
	source := id{"Source", "default", "web"}.recordName()
	check.NoError(t, "decode a record", json.Unmarshal(records[source], &r))
	r.Status, r.Generation, r.Created = nil, 7, metav1.NewTime(begin.Add(time.Hour))
	records[source], _ = json.Marshal(r)

	after := &standby{t, before.dir, newStore()}
	check.NoError(t, "restore the state", after.restore(path, nil))
	after.own(records, begin.Add(2*time.Hour))
	check.Equal(t, "generation of the Source", after.object("Source", "web").Generation, 7)
	check.Equal(t, "the UID of the Source differs", after.object("Source", "web").resource.GetUID() != before.object("Source",
		"web").resource.GetUID(), true)
	check.Equal(t, "the run has started", after.object("DeletionRequest",
		"forget").resource.(*v1beta1.DeletionRequest).Status.StartTime != nil, true)
}

// A request that another process has run, and that was deleted and created again since, runs with the process that
// remembers the former one. The UID does not depend on the time zone of a process.
func TestRecordsOfARequestThatWasCreatedAgain(t *testing.T) {
	zone := time.Local //nolint:gosmopolitan // The decoder of a record uses it.
	defer func() { time.Local = zone }()
	time.Local = time.FixedZone("CET", 3600)
	for name, text := range map[string]string{"the same": forget, "for another user": strings.Replace(forget, "u1", "u2", 1)} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{"secret.yaml": secret, "web.yaml": webSource, "forget.yaml": forget}
			records, begin := metaStore{}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
			first := newStandby(t, files)
			first.own(records, begin)
			former := first.object("DeletionRequest", "forget").resource.(*v1beta1.DeletionRequest)
			start := metav1.NewTime(begin)
			former.Status.StartTime = &start
			check.NoError(t, "write the records", first.writeRecords(records))
			path := t.TempDir() + "/manifests.json"
			check.NoError(t, "save the state", first.save(path))

			second := newStandby(t, files)
			second.own(records, begin.Add(time.Hour))
			check.Equal(t, "UID with another process", second.object("DeletionRequest", "forget").resource.GetUID(), former.GetUID())
			put(t, second.dir, "forget.yaml", noObjects)
			second.reload(records, begin.Add(2*time.Hour))
			put(t, second.dir, "forget.yaml", text)
			second.reload(records, begin.Add(3*time.Hour))
			again := second.object("DeletionRequest", "forget").resource

			put(t, first.dir, "forget.yaml", text)
			third := &standby{t, first.dir, newStore()}
			check.NoError(t, "restore the state", third.restore(path, nil))
			third.own(records, begin.Add(4*time.Hour))
			got := third.object("DeletionRequest", "forget").resource.(*v1beta1.DeletionRequest)
			check.Equal(t, "UID of the request that was created again", got.GetUID(), again.GetUID())
			check.Equal(t, "start of its run", got.Status.StartTime, (*metav1.Time)(nil))
		})
	}
}

// parkedObjects returns the parked objects of a process, each with its problem.
func (p *standby) parkedObjects() map[string]string {
	found := map[string]string{}
	for _, problem := range p.parked {
		found[problem.Object] = problem.Message
	}
	return found
}

// An object that the log has and the folder of the next owner lacks, or has in an older version, is parked for any time: its
// record is kept, and it is the same object when its manifest is back. A later deletion deletes it.
func TestRecordsOfWhatAFolderLacks(t *testing.T) {
	files := map[string]string{"secret.yaml": secret, "web.yaml": webSource, "crm.yaml": webDestination, "forget.yaml": forget}
	records, begin := metaStore{}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	first := newStandby(t, files)
	first.own(records, begin)
	crm := id{"WebhookDestination", "default", "crm"}
	newer := strings.Replace(webDestination, "hooks.example", "new.example", 1)
	put(t, first.dir, "crm.yaml", newer)
	first.reload(records, begin.Add(time.Minute))
	for _, o := range first.objects {
		if o.kind == "DeletionRequest" {
			start := metav1.NewTime(begin)
			o.resource.(*v1beta1.DeletionRequest).Status.StartTime = &start
		}
	}
	check.NoError(t, "write the records", first.writeRecords(records))

	delete(files, "secret.yaml")
	delete(files, "forget.yaml")
	delete(files, "web.yaml")
	files["web-of-another-namespace.yaml"] = strings.Replace(webSource, "name: web,", "name: web, namespace: other,", 1)
	next := newStandby(t, files) // Its crm.yaml is the older one.
	next.own(records, begin.Add(time.Hour))
	next.reload(records, begin.Add(30*24*time.Hour))
	got := next.parkedObjects()
	for object, want := range map[string]string{
		"Secret default/web-key":         "posthorn discard web-key -n default",
		"Source default/web":             "posthorn discard web -n default",
		"DeletionRequest default/forget": "the log has this object",
		"WebhookDestination default/crm": "the log has a newer version",
	} {
		if !strings.Contains(got[object], want) {
			t.Errorf("problem of %s: got %q, want %q", object, got[object], want)
		}
	}
	check.Equal(t, "parked objects", len(got), 4)
	check.Equal(t, "the older destination is in effect", next.objects[crm] != nil, false)
	check.Equal(t, "the namespace lacks a run", next.lacksRun("default"), true)
	check.Equal(t, "another namespace lacks a run", next.lacksRun("other"), false)

	// The first owner owns the slot again, after a restart.
	path := t.TempDir() + "/manifests.json"
	check.NoError(t, "save the state", first.save(path))
	again := &standby{t, first.dir, newStore()}
	check.NoError(t, "restore the state", again.restore(path, nil))
	again.own(records, begin.Add(31*24*time.Hour))
	if got := again.parkedObjects(); len(got) != 1 || got["Source other/web"] == "" {
		t.Errorf("parked objects of the first owner: got %v, want only the Source that the other owner added", got)
	}
	for id, o := range first.objects {
		if o.resource != nil {
			check.Equal(t, "UID of "+id.String(), again.objects[id].resource.GetUID(), o.resource.GetUID())
		}
	}
	put(t, again.dir, "crm.yaml", noObjects)
	again.reload(records, begin.Add(32*24*time.Hour))
	check.Equal(t, "the deleted destination has a record", records[crm.recordName()] != nil, false)
	check.Equal(t, "parked objects after a deletion", len(again.parked), 1)
}

// A process that has applied the newest version returns to an older one, also while it does not run.
func TestOlderVersionOfTheSameProcess(t *testing.T) {
	newer := strings.Replace(webDestination, "hooks.example", "new.example", 1)
	records, begin := metaStore{}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	p := newStandby(t, map[string]string{"secret.yaml": secret, "web.yaml": webSource, "crm.yaml": webDestination})
	p.own(records, begin)
	for i, text := range []string{newer, webDestination, newer} {
		put(t, p.dir, "crm.yaml", text)
		p.reload(records, begin.Add(time.Duration(i)*time.Hour))
		check.Equal(t, "generation", p.object("WebhookDestination", "crm").Generation, int64(i+2))
	}
	path := t.TempDir() + "/manifests.json"
	check.NoError(t, "save the state", p.save(path))
	put(t, p.dir, "crm.yaml", webDestination)
	again := &standby{t, p.dir, newStore()}
	check.NoError(t, "restore the state", again.restore(path, nil))
	again.own(records, begin.Add(5*time.Hour))
	check.Equal(t, "generation after a restart with the older version", again.object("WebhookDestination", "crm").Generation, 5)
	check.Equal(t, "parked objects", len(again.parked), 0)
}

// A standby knows what it would park as the owner: what its folder lacks, or has in an older version. A valid earlier form
// of a manifest that is not valid now does not count as missing.
func TestLacks(t *testing.T) {
	files := map[string]string{"secret.yaml": secret, "web.yaml": webSource, "crm.yaml": webDestination}
	records, begin := metaStore{"job/other": []byte("{}")}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	owner := newStandby(t, files)
	p := newStandby(t, files)
	state := filepath.Join(t.TempDir(), "manifests.json")
	lacks := NewLacks(Options{Dir: p.dir, StateFile: state})
	want := func(when string, want ...string) {
		t.Helper()
		for _, attempt := range []string{"", ", compared again"} {
			got := lacks(records)
			slices.Sort(got)
			check.Same(t, "what the standby lacks "+when+attempt, got, want)
		}
	}
	want("before there is an owner")
	owner.own(records, begin)
	want("with the same manifests")
	put(t, owner.dir, "crm.yaml", strings.Replace(webDestination, "hooks.example", "new.example", 1))
	owner.reload(records, begin.Add(time.Minute))
	want("after a change at the owner", "WebhookDestination default/crm")
	put(t, p.dir, "crm.yaml", strings.Replace(webDestination, "hooks.example", "newer.example", 1))
	want("with a version that the log never had")
	put(t, p.dir, "web.yaml", "{")
	want("with an invalid manifest", "Source default/web")
	put(t, p.dir, "web.yaml", webSource)
	check.NoError(t, "remove the Secret", os.Remove(filepath.Join(p.dir, "secret.yaml")))
	want("without the Secret", "Secret default/web-key")

	// It was an owner itself.
	put(t, p.dir, "secret.yaml", secret)
	p.own(records, begin.Add(time.Hour))
	check.NoError(t, "save the state", p.save(state))
	put(t, p.dir, "web.yaml", "{")
	want("with a last valid form")
	put(t, owner.dir, "web.yaml", strings.Replace(webSource, "spec: {", "spec: {suspend: true, ", 1))
	owner.own(records, begin.Add(2*time.Hour))
	want("with an outdated last valid form", "Source default/web")
	check.NoError(t, "remove the Source", os.Remove(filepath.Join(p.dir, "web.yaml")))
	want("without a manifest that it had as the owner", "Source default/web")
	check.NoError(t, "remove the folder", os.RemoveAll(p.dir))
	if got := lacks(records); len(got) != 1 || !strings.HasPrefix(got[0], "all objects (read manifests: ") {
		t.Errorf("what the standby lacks without its folder: got %q, want all objects, with the error", got)
	}
	check.Same(t, "what it lacks without records", lacks(metaStore{"job/other": []byte("{}")}), []string(nil))
}
