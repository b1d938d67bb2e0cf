package standalone

import (
	"fmt"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/test/check"
)

// Each case replaces a file of three objects, in a store that has read the file before, and
// in a store that has only the state file of an earlier process.
func TestIncompleteFiles(t *testing.T) {
	const (
		source = "apiVersion: posthorn.dev/v1beta1\nkind: Source\nmetadata: {name: web}\nspec:\n  writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]\n  allowedOrigins: [\"https://shop.example\"]\n"
		good   = secret + "---\n" + source + "---\n" + webDestination
		empty  = "the file is empty, and the last valid version of 3 objects is kept"
		within = "the file ends within a document of its last valid form"
	)
	key, web, crm := "Secret default/web-key", "Source default/web", "WebhookDestination default/crm"
	all := []string{key, web, crm}
	before := func(text string) string { return good[:strings.Index(good, text)] }
	for name, c := range map[string]struct {
		text    string
		objects []string
		problem string
		// restored are the objects in a process that has not read the file before; nil means the
		// same objects.
		restored []string
	}{
		"0 bytes":                        {text: "", objects: all, problem: empty},
		"white space":                    {text: " \n\n", objects: all, problem: empty},
		"comments and separators":        {text: "# later\n---\n# more\n", objects: all, problem: empty},
		"cut within a value":             {text: before("stringData") + "stri", objects: all, problem: "not YAML"},
		"cut in a document, not valid":   {text: before("spec:"), objects: all, problem: within, restored: []string{key, web}},
		"cut in a document, still valid": {text: before("  allowedOrigins"), objects: all, problem: within, restored: []string{key, web}},
		"cut behind a document":          {text: secret, objects: []string{key}},
		"cut before the line end":        {text: strings.TrimSuffix(secret, "\n"), objects: []string{key}},
		"cut behind the separator":       {text: secret + "---\n", objects: []string{key}},
		"the end of the last document":   {text: good + "# a comment", objects: all},
		"another beginning":              {text: "# mine\n" + secret, objects: []string{key}},
		"an empty List":                  {text: noObjects},
		"another kind alone":             {text: "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
			now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
			load := func(s *store, text string, wantObjects []string, wantProblem string) {
				t.Helper()
				put(t, dir, "a.yaml", text)
				marks, err := manifests(dir)
				if err != nil {
					t.Fatal(err)
				}
				s.load(marks, now)
				var objects, problems []string
				for _, o := range s.sorted() {
					objects = append(objects, o.String())
				}
				for _, p := range s.problems {
					problems = append(problems, p.String())
				}
				if diff := cmp.Diff(wantObjects, objects); diff != "" {
					t.Errorf("objects (-want +got):\n%s", diff)
				}
				if got := strings.Join(problems, "\n"); (wantProblem == "") != (got == "") || !strings.Contains(got, wantProblem) {
					t.Errorf("problems %q, want one with %q", got, wantProblem)
				}
			}
			s := newStore()
			load(s, good, all, "")
			revisions := s.objects[id{"Source", "default", "web"}].Generation
			if err := s.save(state); err != nil {
				t.Fatal(err)
			}
			for range 2 { // Loading the same text again has the same result.
				load(s, c.text, c.objects, c.problem)
			}
			if web := s.objects[id{"Source", "default", "web"}]; web != nil && web.Generation != revisions {
				t.Errorf("the Source has generation %d, want its last valid form, %d", web.Generation, revisions)
			}
			load(s, good, all, "")

			restored := newStore()
			if err := restored.restore(state, nil); err != nil {
				t.Fatal(err)
			}
			if c.restored == nil {
				load(restored, c.text, c.objects, c.problem)
			} else if put(t, dir, "a.yaml", c.text); true {
				marks, _ := manifests(dir)
				restored.load(marks, now)
				var objects []string
				for _, o := range restored.sorted() {
					objects = append(objects, o.String())
				}
				if diff := cmp.Diff(c.restored, objects); diff != "" {
					t.Errorf("after a restart, objects (-want +got):\n%s", diff)
				}
			}
		})
	}
}

// A file that is cut within a line can be valid and have all objects. It has no effect. The
// same text with a line break at its end is an edit.
func TestFileCutWithinALine(t *testing.T) {
	const good = webSource + "---\napiVersion: v1\nkind: Secret\nmetadata: {name: web-key}\nstringData:\n  writeKey: canary-key\n"
	cut := strings.TrimSuffix(good, "-key\n")
	dir, s := t.TempDir(), newStore()
	for _, step := range []struct {
		text, problem string
		generation    int64
	}{
		{good, "", 1},
		{cut, "the file ends within a line of its last valid form", 1},
		{cut, "the file ends within a line of its last valid form", 1},
		{good, "", 1},
		{strings.TrimSuffix(good, "\n"), "", 1},
		{cut + "\n", "", 2},
	} {
		put(t, dir, "a.yaml", step.text)
		marks, err := manifests(dir)
		if err != nil {
			t.Fatal(err)
		}
		s.load(marks, time.Now())
		var problems []string
		for _, p := range s.problems {
			problems = append(problems, p.String())
		}
		if got := strings.Join(problems, "\n"); (step.problem == "") != (got == "") || !strings.Contains(got, step.problem) {
			t.Errorf("%q: problems %q, want one with %q", step.text, got, step.problem)
		}
		if o := s.objects[id{"Secret", "default", "web-key"}]; o == nil || o.Generation != step.generation {
			t.Errorf("%q: the Secret is %+v, want generation %d", step.text, o, step.generation)
		}
	}
}

// Each case reads files again that had a Source, a destination and a request.
func TestMerge(t *testing.T) {
	const (
		source, crm, request = "Source default/web", "WebhookDestination default/crm", "DeletionRequest default/forget"
		kept                 = " is kept"
	)
	all := webSource + "---\n" + webDestination + "---\n" + forget
	newSource := strings.ReplaceAll(webSource, "name: web,", "name: ios,")
	read := func(path, text string) *file {
		return &file{path: path, text: []byte(text), parsed: parse(path, []byte(text))}
	}
	in := func(file string, names ...string) map[string]string {
		all := map[string]string{}
		for _, name := range names {
			all[name] = file
		}
		return all
	}
	for name, c := range map[string]struct {
		a, b string
		// The objects by name, each with its file, and a part of each problem.
		want     map[string]string
		problems []string
	}{
		"removed":       {webSource, "", in("a.yaml", source), nil},
		"not readable":  {"{", "", in("a.yaml"+kept, source, crm, request), []string{"not YAML"}},
		"empty":         {"", "", in("a.yaml"+kept, source, crm, request), []string{"3 objects is kept"}},
		"moved":         {"# none", all, in("b.yaml", source, crm, request), nil},
		"moved in part": {"{", webSource, in("a.yaml"+kept, source, crm, request), []string{"not YAML", "the object is also in a.yaml"}},
		"not valid": {strings.Replace(webDestination, "endpoints", "endpionts", 1), "", in("a.yaml"+kept, crm),
			[]string{"endpionts", "spec.endpoints: Required"}},
		"of an unknown kind": {strings.Replace(webDestination, "kind: WebhookDestination", "kind: Webhook", 1), "", in("a.yaml"+kept, crm),
			[]string{crm + ": kind"}},
		"changed against a rule": {noObjects, strings.Replace(forget, "u1", "u2", 1), in("b.yaml"+kept, request), []string{"immutable"}},
		"in two files":           {all, webSource, in("a.yaml", source, crm, request), []string{"the object is also in a.yaml"}},
		"new and outdated":       {newSource, all, in("b.yaml", source, crm, request), nil},
	} {
		t.Run(name, func(t *testing.T) {
			old, _, problems := merge(nil, []*file{read("a.yaml", all)}, func(*object) bool { return false })
			check.Same(t, "problems before", problems, nil)
			next, _, problems := merge(old, []*file{read("a.yaml", c.a), read("b.yaml", c.b)}, func(o *object) bool { return o.name == "ios" })
			got := map[string]string{}
			for id, o := range next {
				got[id.String()] = o.file
				if was := old[id]; was != nil && was.object == o.object {
					got[id.String()] += kept
				}
			}
			check.Same(t, "objects", got, c.want)
			if !slices.EqualFunc(problems, c.problems, func(p manifest.Problem, part string) bool { return strings.Contains(p.String(), part) }) {
				t.Errorf("problems: got %v, want %q", problems, c.problems)
			}
		})
	}
}

// The effect of a problem names what is in effect instead of the manifest.
func TestProblemEffect(t *testing.T) {
	dir := t.TempDir()
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := newStore()
	load := func(at time.Time, texts ...string) []manifest.Problem {
		t.Helper()
		for i, text := range texts {
			put(t, dir, fmt.Sprintf("%d.yaml", i), text)
		}
		marks, err := manifests(dir)
		if err != nil {
			t.Fatal(err)
		}
		before := s.problems
		s.load(marks, at)
		s.explainProblems(before, at)
		return s.problems
	}
	misspelt := strings.Replace(webDestination, "endpoints", "endpionts", 1)

	if p := load(begin, misspelt)[0]; p.Effect != "there is no earlier valid version, so the object does not exist" {
		t.Errorf("effect at the first load: got %q, want that the object does not exist", p.Effect)
	}
	load(begin.Add(time.Minute), webDestination)
	first := load(begin.Add(2*time.Minute), misspelt)[0]
	if want := "the version of 2026-01-02T03:05:05Z remains in effect"; first.Effect != want {
		t.Errorf("effect of an edit: got %q, want %q", first.Effect, want)
	}
	if diff := cmp.Diff([]string{"WebhookDestination default/crm"}, first.Outdated); diff != "" {
		t.Errorf("outdated objects (-want +got):\n%s", diff)
	}
	if again := load(begin.Add(3 * time.Minute))[0]; !again.Since.Equal(begin.Add(2 * time.Minute)) {
		t.Errorf("since: got %v, want the time of the first load with the problem", again.Since)
	}
	unknown := load(begin.Add(210*time.Second), strings.Replace(webDestination, "kind: WebhookDestination", "kind: WebhookDestinaton", 1))[0]
	if want := "the version of 2026-01-02T03:05:05Z remains in effect"; unknown.Effect != want ||
		unknown.Object != "WebhookDestination default/crm" {
		t.Errorf("effect of a misspelt kind: got %q of %s, want %q of WebhookDestination default/crm", unknown.Effect, unknown.Object, want)
	}
	load(begin.Add(4*time.Minute), webSource+"---\n"+webDestination)
	p := load(begin.Add(5*time.Minute), "a: [\n")
	if want := "the last valid versions of its 2 objects remain in effect"; p[0].Effect != want {
		t.Errorf("effect of an unreadable file: got %q, want %q", p[0].Effect, want)
	}
}

// A response reports the problems of the manifests as warnings, which kubectl prints.
func TestProblemsAreWarnings(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", secret)
	for _, name := range "bcdefghijklm" {
		put(t, dir, string(name)+".yaml", "a: [\n")
	}
	c := New(Options{Dir: dir})
	marks, err := manifests(dir)
	if err != nil {
		t.Fatal(err)
	}
	c.store.load(marks, time.Now())
	put(t, dir, "a.yaml", "")
	if marks, err = manifests(dir); err != nil {
		t.Fatal(err)
	}
	c.store.load(marks, time.Now())

	w := httptest.NewRecorder()
	c.Handler().ServeHTTP(w, httptest.NewRequest("GET", Prefix+"/sources", nil))
	warnings, errs := utilnet.ParseWarningHeaders(w.Header().Values("Warning"))
	if w.Code != 200 || len(errs) > 0 || len(warnings) != maxWarnings+1 {
		t.Fatalf("%d, %d warnings, want %d: %v %v", w.Code, len(warnings), maxWarnings+1, warnings, errs)
	}
	if first := warnings[0].Text; !strings.Contains(first, "a.yaml: the file is empty") {
		t.Errorf("the first warning is %q, want the warning of a.yaml", first)
	}
	if last := warnings[maxWarnings].Text; last != "3 more problems; posthorn problems lists all" {
		t.Errorf("the last warning is %q", last)
	}
}

// A response with Sources or destinations names the messages that will be discarded.
func TestDiscardsAreWarnings(t *testing.T) {
	discards := []adminapi.Discard{{Source: "web", Destination: "crm", Messages: 3, At: time.Now().Add(time.Hour)}}
	report := &adminapi.Report{Pod: "here", Ready: true, Configs: []adminapi.ConfigReport{{Namespace: "shop", Discards: discards}}}
	c := New(Options{Dir: t.TempDir(), Changes: func(string) *adminapi.Report { return report }})
	c.dueNamespaces(time.Now(), "")
	for path, want := range map[string]int{"/sources": 1, "/webhookdestinations": 1, "/namespaces/shop/webhookdestinations": 1,
		"/namespaces/other/webhookdestinations": 0, "/audiences": 0} {
		w := httptest.NewRecorder()
		c.Handler().ServeHTTP(w, httptest.NewRequest("GET", Prefix+path, nil))
		warnings, _ := utilnet.ParseWarningHeaders(w.Header().Values("Warning"))
		if len(warnings) != want {
			t.Fatalf("warnings of %s: got %+v, want %d", path, warnings, want)
		}
		if want > 0 && !strings.Contains(warnings[0].Text, `3 pending messages of Source "web" for WebhookDestination "crm" in namespace shop will be discarded in `) {
			t.Errorf("warning of %s: got %q", path, warnings[0].Text)
		}
	}
}

// A restored object whose manifest has not changed is the one that was made from the file, so it is
// validated once. Another one is made from the state.
func TestRestoredObjectsAreValidatedOnce(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	put(t, dir, "a.yaml", secret+"---\n"+webSource)
	put(t, dir, "b.yaml", webDestination)
	marks, _ := manifests(dir)
	first := newStore()
	first.load(marks, now)
	if err := first.save(state); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "b.yaml", strings.ReplaceAll(webDestination, "hooks.example", "other.example"))

	marks, _ = manifests(dir)
	second := newStore()
	if err := second.restore(state, marks); err != nil {
		t.Fatal(err)
	}
	parsed := map[*object]bool{}
	for _, f := range second.files {
		for _, o := range f.objects {
			parsed[o] = true
		}
	}
	got := map[string]bool{}
	for _, o := range second.sorted() {
		got[o.String()] = parsed[o.object]
	}
	want := map[string]bool{"Secret default/web-key": true, "Source default/web": true, "WebhookDestination default/crm": false}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("restored objects that were made from the files (-want +got):\n%s", diff)
	}
	before := second.files[filepath.Join(dir, "a.yaml")]
	second.load(marks, now)
	if second.files[filepath.Join(dir, "a.yaml")] != before {
		t.Error("an unchanged file was read again")
	}
	generations := map[string]int64{}
	for _, o := range second.sorted() {
		generations[o.String()] = o.Generation
	}
	if diff := cmp.Diff(map[string]int64{"Secret default/web-key": 1, "Source default/web": 1, "WebhookDestination default/crm": 2},
		generations); diff != "" {
		t.Errorf("generations (-want +got):\n%s", diff)
	}
}

// The explanation of a problem does not look at the objects of other files, so the start with many
// invalid manifests takes time in proportion to their number.
func TestProblemsAreExplainedInLinearTime(t *testing.T) {
	allocations := func(problems int) float64 {
		s := newStore()
		for i := range problems {
			o := &object{id: id{kindDestination, "default", fmt.Sprintf("d%d", i)}}
			s.objects[o.id] = &stored{object: o, file: fmt.Sprintf("%d.yaml", i)}
			s.problems = append(s.problems, manifest.Problem{File: fmt.Sprintf("%d.yaml", i), Object: o.String()})
		}
		each := testing.AllocsPerRun(1, func() { s.explainProblems(nil, time.Time{}) }) / float64(problems)
		if got := s.problems[0]; len(got.Outdated) != 1 || got.Effect == "" {
			t.Fatalf("problem %+v, want one with an object that remains in effect", got)
		}
		return each
	}
	if few, many := allocations(100), allocations(2000); many > 2*few {
		t.Errorf("%.0f allocations per problem of 2,000, want about the %.0f of 100", many, few)
	}
}
