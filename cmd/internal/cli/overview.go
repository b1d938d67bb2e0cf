package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
	"github.com/posthorn/posthorn/internal/plural"
)

// inventory is what why and status read: the objects of some namespaces, and the state of the
// dispatchers if it is available.
type inventory struct {
	// kind is the kind of the objects; empty for all.
	kind         string
	sources      []v1beta1.Source
	destinations []v1beta1.WebhookDestination
	// others are the objects of all kinds but WebhookDestination.
	others    []conditioned
	manifests []manifest.Problem
	// gone are the resources that the cluster does not serve, while it serves others.
	gone []string
	// replication is the replicated log; with 0 slots there is none.
	replication replication
	// operatorRenewed is when the operator last renewed its Lease; zero if that is not known.
	operatorRenewed time.Time
	liveState
	now time.Time
	// elsewhere counts the problems of other namespaces, as far as they are known.
	elsewhere int
}

// conditioned is an object of any kind.
type conditioned struct {
	kind     string
	Metadata metav1.ObjectMeta `json:"metadata"`
	Status   struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// trouble is a problem of one object, with the fields of a finding. Name is empty for a manifest
// that has no object.
type trouble struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	why.Finding
}

// lister returns the JSON list of a resource.
type lister func(ctx context.Context, resource string) ([]byte, error)

// otherKinds maps resources to their kinds, without the destinations.
var otherKinds = []struct{ resource, kind string }{
	{"sources", "Source"}, {"audiences", "Audience"}, {"deletionrequests", "DeletionRequest"}, {"redeliveries", "Redelivery"},
}

// addObjects reads all objects. It fails if the cluster serves none of the kinds.
func (v *inventory) addObjects(ctx context.Context, read lister) error {
	list := func(ctx context.Context, resource string) ([]byte, error) {
		body, err := read(ctx, resource)
		if notServed(err) && len(v.gone) < len(otherKinds) {
			v.gone, body, err = append(v.gone, resource), []byte("{}"), nil
		}
		return body, err
	}
	var destinations v1beta1.WebhookDestinationList
	body, err := list(ctx, "webhookdestinations")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, &destinations); err != nil {
		return fmt.Errorf("webhookdestinations: %w", err)
	}
	v.destinations = destinations.Items
	for _, k := range otherKinds {
		if body, err = list(ctx, k.resource); err != nil {
			return err
		}
		var objects struct {
			Items []conditioned `json:"items"`
		}
		if err := json.Unmarshal(body, &objects); err != nil {
			return fmt.Errorf("%s: %w", k.resource, err)
		}
		for _, o := range objects.Items {
			o.kind = k.kind
			v.others = append(v.others, o)
		}
		if k.resource == "sources" {
			var sources v1beta1.SourceList
			if err := json.Unmarshal(body, &sources); err != nil {
				return fmt.Errorf("sources: %w", err)
			}
			v.sources = sources.Items
		}
	}
	return nil
}

// addLive adds the state of dispatchers: of all, or after an error of none.
func (v *inventory) addLive(ctx context.Context, targets []target) error {
	read, err := readLive(ctx, targets)
	if err == nil {
		v.liveState = read
	}
	return err
}

// troubles returns the first problem of every object that has one: rejected manifests, then
// destinations, then the other kinds. idle describes the Sources that have never had a call, which is
// no problem of a new installation. A full disk is one problem, whatever depends on it.
func (v *inventory) troubles(namespace string) (found []trouble, idle []string) {
	found = []trouble{}
	full := map[string]bool{}
	for _, r := range v.reports {
		if r.Storage.Pressure && !full[r.Pod] { // Several slots of a pod are on one disk.
			full[r.Pod] = true
			found = append(found, trouble{Kind: "Dispatcher", Name: r.Pod, Finding: why.DiskFull(r, namespace)})
		}
	}
	if away := why.OperatorAway(v.operatorRenewed, v.now); away != nil {
		found = append(found, trouble{Kind: "Lease", Name: operatorLease, Finding: *away})
	}
	for _, problem := range v.replication.problems() {
		found = append(found, trouble{Kind: "Replication", Name: v.replication.asked, Finding: why.Finding{Level: why.Problem, About: "Replication", Text: problem}})
	}
	for _, resource := range v.gone {
		found = append(found, trouble{Kind: "CustomResourceDefinition", Name: resource + "." + v1beta1.GroupVersion.Group,
			Finding: why.KindGone(kindOf(resource))})
	}
	for _, p := range v.manifests {
		if kind, object, ok := strings.Cut(p.Object, " "); ok && p.Parked {
			namespace, name, _ := strings.Cut(object, "/")
			found = append(found, trouble{kind, namespace, name, why.Parked(p, v.now)})
			continue
		}
		found = append(found, trouble{Kind: "Manifest", Name: p.Position(), Finding: why.Finding{Level: why.Problem, About: "Manifest", Reason: v1beta1.ReasonManifestRejected, Since: p.Since, Text: strings.TrimPrefix(p.Detail(), p.Position()+": "), Fix: "correct the manifest"}})
	}
	found = append(found, v.parked(namespace)...)
	seen := map[string]bool{}
	sources := map[string][]v1beta1.Source{}
	for _, s := range v.sources {
		sources[s.Namespace] = append(sources[s.Namespace], s)
	}
	for i, d := range v.destinations {
		facts := why.Facts{Namespace: d.Namespace, Name: d.Name, Sources: sources[d.Namespace], Destinations: v.destinations[i : i+1],
			Reports: v.reports, Now: v.now}
		findings := why.Explain(facts)
		if cause := why.Cause(findings); cause != nil && !cause.Idle && cause.About != "Disk" { // It is a problem of a dispatcher or a Source.
			found = append(found, trouble{"WebhookDestination", d.Namespace, d.Name, *cause})
		}
		for _, f := range findings {
			if text := f.Text + " in namespace " + d.Namespace; f.Idle && !seen[text] {
				seen[text] = true
				idle = append(idle, text)
			}
		}
	}
	for _, o := range v.others {
		if c := o.problem(); c != nil && (len(full) == 0 || c.Reason != v1beta1.ReasonStoragePressure) {
			found = append(found, trouble{o.kind, o.Metadata.Namespace, o.Metadata.Name,
				why.Finding{Level: why.Problem, About: c.Reason, Text: c.Message, Fix: why.Fix(c.Reason), Reason: c.Reason,
					Since: c.LastTransitionTime.Time}})
		} else if f := v.refusing(&o); c == nil && f != nil && len(full) == 0 {
			found = append(found, trouble{o.kind, o.Metadata.Namespace, o.Metadata.Name, *f})
		}
	}
	return found, idle
}

// refusing explains that a Source's calls get 503, although no condition has this; nil for other objects.
func (v *inventory) refusing(o *conditioned) *why.Finding {
	if o.kind != "Source" {
		return nil
	}
	return why.Refusing(v.reports, o.Metadata.Namespace, o.Metadata.Name, v.now)
}

// parked returns a trouble for each object of a namespace, "" for all, that the dispatchers park and no manifest explains.
func (v *inventory) parked(namespace string) (list []trouble) {
	for _, r := range v.reports {
		for _, c := range r.Configs {
			for _, p := range c.Parked {
				section, name, _ := strings.Cut(p.Object, "/")
				t := trouble{kindOf(section), c.Namespace, name, why.Finding{
					Level: why.Problem, About: "Config",
					Text: "missing since " + p.Since.UTC().Format(time.RFC3339) + " although it was not deleted: " + manifest.EffectOfParked(kindOf(section)),
					Fix:  "create it again; to discard its messages, create and delete it",
				}}
				isOfManifest := func(m manifest.Problem) bool { return m.Object == t.Kind+" "+t.Namespace+"/"+t.Name }
				if (namespace == "" || namespace == t.Namespace) && (v.kind == "" || v.kind == t.Kind) && !slices.Contains(list, t) &&
					!slices.ContainsFunc(v.manifests, isOfManifest) {
					list = append(list, t)
				}
			}
		}
	}
	return list
}

// problem returns the first condition that needs an action of the user, in the order of v1beta1.Worst, or nil. A rejected
// manifest is a problem of its own: see why.Manifests.
func (o *conditioned) problem() *metav1.Condition {
	for _, bad := range []struct {
		condition string
		status    metav1.ConditionStatus
	}{
		{v1beta1.ConditionAccepted, metav1.ConditionFalse}, {v1beta1.ConditionResolvedRefs, metav1.ConditionFalse},
		{v1beta1.ConditionFailed, metav1.ConditionTrue}, {v1beta1.ConditionStalled, metav1.ConditionTrue},
		{v1beta1.ConditionProgrammed, metav1.ConditionFalse}, {v1beta1.ConditionReceiving, metav1.ConditionFalse},
	} {
		c := meta.FindStatusCondition(o.Status.Conditions, bad.condition)
		if c != nil && c.Status == bad.status && c.Reason != v1beta1.ReasonPending {
			return c
		}
	}
	return nil
}

// notices returns what may be intended: idle Sources, discards ahead, and unknown write keys.
func (v *inventory) notices(idle []string, namespace string) []string {
	texts := append([]string{}, idle...)
	if namespace != "" && len(v.destinations)+len(v.others)+len(v.manifests) == 0 {
		texts = append(texts, fmt.Sprintf("there are no objects in namespace %q; set another --namespace, or all with -A", namespace))
	}
	for _, d := range v.destinations {
		if text := why.Stranded(d.Status.Conditions); text != "" {
			texts = append(texts, fmt.Sprintf("WebhookDestination %s/%s: %s", d.Namespace, d.Name, text))
		}
	}
	for _, r := range v.reports {
		texts = append(texts, why.DiscardsAhead(r.Configs, namespace, v.now)...)
	}
	if len(v.reports) == 0 {
		texts = append(texts, v.announcedDiscards()...)
	}
	if text := why.UnknownKeys(v.unknownKeys, v.now); text != "" {
		texts = append(texts, text)
	}
	return texts
}

// announcedDiscards returns the discards ahead in the conditions of the objects.
func (v *inventory) announcedDiscards() (texts []string) {
	add := func(kind string, o metav1.ObjectMeta, conditions []metav1.Condition) {
		if text := why.AnnouncedDiscard(conditions); text != "" {
			texts = append(texts, fmt.Sprintf("%s %s/%s: %s", kind, o.Namespace, o.Name, text))
		}
	}
	for _, d := range v.destinations {
		add("WebhookDestination", d.ObjectMeta, d.Status.Conditions)
	}
	for _, o := range v.others {
		add(o.kind, o.Metadata, o.Status.Conditions)
	}
	return texts
}

// printTroubles prints a paragraph for each trouble, and a line for each notice: at most most of each,
// if it is not 0.
func printTroubles(w io.Writer, found []trouble, notices []string, most int) {
	shown, shownNotices := len(found), len(notices)
	if most > 0 {
		shown, shownNotices = min(shown, most), min(shownNotices, most)
	}
	for _, t := range found[:shown] {
		name := t.Name
		if t.Namespace != "" {
			name = t.Namespace + "/" + name
		}
		fmt.Fprintf(w, "%s: %s\n", command.Paint(w, command.Red, strings.TrimSpace(t.Kind+" "+name)), sentence(t.Text))
		if since := sinceLine(t.Finding, time.Now()); since != "" {
			fmt.Fprintln(w, "  "+since)
		}
		if t.Fix != "" {
			fmt.Fprintf(w, "  To do: %s\n", sentence(t.Fix))
		}
	}
	if more := len(found) - shown; more > 0 {
		fmt.Fprintf(w, "… and %s; 'why -A' prints all.\n", plural.Count(more, "more problem"))
	}
	for _, text := range notices[:shownNotices] {
		fmt.Fprintln(w, command.Paint(w, command.Yellow, "Notice:"), sentence(text))
	}
	if more := len(notices) - shownNotices; more > 0 {
		fmt.Fprintf(w, "… and %s.\n", plural.Count(more, "more notice"))
	}
}

// explainAll is why without a name: it prints all troubles, and fails if there is one. With each, it
// also prints the objects without a problem.
func (v *inventory) explainAll(cmd *cobra.Command, objects *command.Objects, namespace string, each bool) error {
	found, idle := v.troubles(namespace)
	if objects.Chosen() {
		if err := command.PrintAll(cmd.OutOrStdout(), objects, found); err != nil {
			return err
		}
	} else {
		var notices []string
		if !each {
			notices = v.notices(idle, namespace)
		}
		printTroubles(cmd.OutOrStdout(), found, notices, 0)
		names, troubled, n, verb := v.names(), v.troubled(found), 0, "have"
		for _, name := range names {
			if troubled[name] {
				n++
			} else if each {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: no problem found.\n", name)
			}
		}
		for _, o := range v.others {
			if text := why.Defects(v.reports, o.Metadata.Namespace, o.Metadata.Name); each && o.kind == "Source" && text != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "Source %s/%s: %s.\n", o.Metadata.Namespace, o.Metadata.Name, text)
			}
		}
		if n == 1 || len(names) == 1 {
			verb = "has"
		}
		where, others := "", ""
		if namespace != "" {
			where = " in namespace " + namespace
		}
		if n == 0 && len(found) > 0 {
			others = "; " + plural.Count(len(found), "other problem") + " above"
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "%d of %s%s %s a problem%s.%s\n", n, plural.Count(len(names), "object"), where, verb, others,
			v.otherProblems())
	}
	if len(found) > 0 {
		return command.ErrFailed
	}
	return nil
}

// otherProblems reports the problems of other namespaces; it is empty without any.
func (v *inventory) otherProblems() string {
	if v.elsewhere == 0 {
		return ""
	}
	return fmt.Sprintf(" %s in other namespaces: see 'why -A'.", plural.Count(v.elsewhere, "problem"))
}

// troubled returns the objects in troubles, and the objects of rejected manifests, as "Kind namespace/name".
func (v *inventory) troubled(found []trouble) map[string]bool {
	objects := map[string]bool{}
	for _, t := range found {
		objects[t.Kind+" "+t.Namespace+"/"+t.Name] = true
	}
	for _, p := range v.manifests {
		objects[p.Object] = true
		for _, object := range p.Outdated {
			objects[object] = true
		}
	}
	return objects
}

// names returns all objects as "Kind namespace/name".
func (v *inventory) names() (list []string) {
	for _, d := range v.destinations {
		list = append(list, "WebhookDestination "+d.Namespace+"/"+d.Name)
	}
	for _, o := range v.others {
		list = append(list, o.kind+" "+o.Metadata.Namespace+"/"+o.Metadata.Name)
	}
	return list
}

// objectOf returns the resource and the name of an argument NAME, which is a destination, or
// KIND/NAME; both are empty without an argument.
func objectOf(args []string) (resource, name string, err error) {
	if len(args) == 0 {
		return "", "", nil
	}
	kind, name, ok := strings.Cut(args[0], "/")
	if !ok {
		return "webhookdestinations", args[0], nil
	}
	// A kind may have its group, as in the output of get -o name.
	kind, _, _ = strings.Cut(kind, ".")
	resources, err := resourcesOf(kind)
	if err != nil && name != "" && !strings.Contains(name, "/") && command.DidYouMean(kind, kindNames) == "" {
		return "", "", command.Usagef("%q is not a kind; for an object of that namespace: %s -n %s", kind, quoted(name), quoted(kind))
	}
	if err != nil {
		return "", "", err
	}
	if len(resources) != 1 || name == "" {
		return "", "", command.Usagef("%q: use KIND/NAME, with one kind", args[0])
	}
	return resources[0], name, nil
}

// explained returns the resource and the name of the argument of why: as objectOf, and of a kind alone
// its resource without a name.
func explained(args []string) (resource, name string, err error) {
	if len(args) == 1 {
		if resource := resourceNames[strings.ToLower(args[0])]; resource != "" {
			return resource, "", nil
		}
	}
	return objectOf(args)
}

// kindOf returns the kind of a resource.
func kindOf(resource string) string {
	for _, k := range otherKinds {
		if k.resource == resource {
			return k.kind
		}
	}
	return "WebhookDestination"
}

// only removes the objects of other kinds; "" keeps all.
func (v *inventory) only(resource string) {
	if resource == "" {
		return
	}
	kind := kindOf(resource)
	v.kind = kind
	if resource != "webhookdestinations" {
		v.destinations = nil
	}
	v.gone = slices.DeleteFunc(v.gone, func(r string) bool { return r != resource })
	v.others = slices.DeleteFunc(v.others, func(o conditioned) bool { return o.kind != kind })
	v.manifests = slices.DeleteFunc(v.manifests, func(p manifest.Problem) bool { return !concernsKind(p, kind) })
}

// concernsKind reports whether a problem concerns a kind: an object of it, a whole file, or an object with
// a kind that does not exist.
func concernsKind(p manifest.Problem, kind string) bool {
	of := func(object string) string {
		kind, _, _ := strings.Cut(object, " ")
		return kind
	}
	own := of(p.Object)
	other := own == "Secret" || own == "WebhookDestination" ||
		slices.ContainsFunc(otherKinds, func(k struct{ resource, kind string }) bool { return k.kind == own })
	return own == kind || !other || slices.ContainsFunc(p.Outdated, func(object string) bool { return of(object) == kind })
}

// explain explains an object that is no destination, or without a name all objects (of a kind).
func (v *inventory) explain(cmd *cobra.Command, objects *command.Objects, namespace, resource, name string) error {
	if name == "" {
		v.only(resource)
		return v.explainAll(cmd, objects, namespace, resource != "")
	}
	kind := kindOf(resource)
	findings := v.findings(kind, namespace, name)
	if slices.Contains(v.gone, resource) {
		findings = []why.Finding{why.KindGone(kind)}
	}
	if away := why.OperatorAway(v.operatorRenewed, v.now); away != nil {
		findings = append([]why.Finding{*away}, findings...)
	}
	return printFindings(cmd.OutOrStdout(), objects, trouble{Kind: kind, Namespace: namespace, Name: name}, findings)
}

// findings explains an object that is no destination: its manifest, then its conditions. The only Problem
// in the conditions is the problem of the object.
func (v *inventory) findings(kind, namespace, name string) []why.Finding {
	found := why.Manifests(v.manifests, kind, namespace, name, v.now)
	rejected := why.Cause(found) != nil
	var names []string
	for _, o := range v.others {
		switch {
		case o.kind != kind:
		case o.Metadata.Name == name:
			found = append(found, o.findings()...)
			if f := v.refusing(&o); f != nil && o.problem() == nil {
				found = append(found, *f)
			}
			return found
		default:
			names = append(names, o.Metadata.Name)
		}
	}
	if !rejected { // Otherwise the manifest is the reason why the object does not exist.
		fix := "create it"
		if like := strings.TrimPrefix(command.DidYouMean(name, names), "; "); like != "" {
			fix = like
		}
		found = append(found, why.Finding{Level: why.Problem, About: kind,
			Text: fmt.Sprintf("there is no %s %q in namespace %q", kind, name, namespace), Fix: fix})
	}
	return found
}

// findings returns a finding for each condition; the problem of the object is the only Problem. It leaves
// out that the manifest was rejected, which is a finding of its own.
func (o *conditioned) findings() []why.Finding {
	var found []why.Finding
	problem := o.problem()
	for i := range o.Status.Conditions {
		c := &o.Status.Conditions[i]
		level, fix := why.Notice, ""
		switch {
		case c.Reason == v1beta1.ReasonManifestRejected:
			continue
		case c == problem:
			level, fix = why.Problem, why.Fix(c.Reason)
		case c.Status == metav1.ConditionTrue && c.Reason != v1beta1.ReasonDiscardAhead:
			level = why.Fine
		}
		found = append(found, why.Finding{Level: level, About: c.Type, Text: c.Message, Fix: fix, Reason: c.Reason,
			Since: c.LastTransitionTime.Time})
	}
	return found
}

// inventory reads the objects of a namespace ("" for all) and the state of the dispatcher.
func (d *direct) inventory(ctx context.Context, namespace string) (*inventory, error) {
	v := &inventory{now: time.Now()}
	prefix := apiPrefix
	if namespace != "" {
		prefix += "/namespaces/" + url.PathEscape(namespace)
	}
	err := v.addObjects(ctx, func(ctx context.Context, resource string) ([]byte, error) {
		body, _, err := d.request(ctx, prefix+"/"+resource, "application/json")
		return body, err
	})
	if err != nil {
		return nil, err
	}
	var problems manifest.Problems
	if err := d.read(ctx, "/problems", &problems); err != nil {
		return nil, err
	}
	for _, p := range problems.Problems {
		if namespace == "" || p.Within(namespace) {
			v.manifests = append(v.manifests, p)
		}
	}
	t, err := d.target()
	if err != nil {
		return nil, err
	}
	targets, err := t.all(ctx)
	if err != nil {
		return nil, err
	}
	if v.replication, err = readReplication(ctx, []target{t}); err != nil {
		return nil, err
	}
	if err := v.addLive(ctx, targets); err != nil || namespace == "" {
		return v, err
	}
	all, err := d.inventory(ctx, "")
	if err != nil {
		return nil, err
	}
	found, _ := all.troubles("")
	own, _ := v.troubles(namespace)
	v.elsewhere = max(0, len(found)-len(own))
	return v, nil
}

// inventory reads the objects of the user's namespace, or of all, with the user's permissions. It returns
// the namespace ("" for all).
func (c *clusterConnector) inventory(ctx context.Context, all bool) (*inventory, string, error) {
	posthorn, err := c.resources()
	if err != nil {
		return nil, "", err
	}
	if all {
		posthorn.namespace = ""
	}
	v := &inventory{now: time.Now(), operatorRenewed: c.operatorRenewed(ctx)}
	return v, posthorn.namespace, v.addObjects(ctx, posthorn.listJSON)
}

// state is the output of status.
type state struct {
	Ready        bool                   `json:"ready"`
	Storage      adminapi.StorageReport `json:"storage"`
	Sources      int                    `json:"sources"`
	Accepted     int64                  `json:"accepted"`
	Rejected     int64                  `json:"rejected"`
	Destinations int                    `json:"destinations"`
	Delivered    int64                  `json:"delivered"`
	Pending      int64                  `json:"pending"`
	Retrying     int64                  `json:"retrying"`
	DeadLetters  int64                  `json:"deadLettersStored"`
	// Replication is the role of the process in a replicated log; empty without one.
	Replication string `json:"replication,omitempty"`
	// Refusing are the Sources, as namespace/name, whose calls get 503.
	Refusing []string  `json:"refusing,omitempty"`
	Problems []trouble `json:"problems"`
	// Elsewhere counts the problems of other namespaces.
	Elsewhere int      `json:"problemsElsewhere,omitempty"`
	Notices   []string `json:"notices"`

	namespace string
}

// state sums up the reports.
func (v *inventory) state(namespace string) state {
	found, idle := v.troubles(namespace)
	s := state{Ready: true, Sources: len(v.sources), Destinations: len(v.destinations), Problems: found, Notices: v.notices(idle, namespace),
		Elsewhere: v.elsewhere, namespace: namespace}
	s.Replication = v.replication.role()
	for _, o := range v.others {
		c := o.problem()
		if c == nil && v.refusing(&o) != nil || c != nil && (c.Reason == v1beta1.ReasonStoragePressure || c.Reason == v1beta1.ReasonUnowned) {
			s.Refusing = append(s.Refusing, o.Metadata.Namespace+"/"+o.Metadata.Name)
		}
	}
	for _, r := range v.reports {
		s.Ready = s.Ready && r.Ready
		s.Storage.UsedBytes += r.Storage.UsedBytes
		s.Storage.FreeBytes += r.Storage.FreeBytes
		s.Storage.TotalBytes += r.Storage.TotalBytes
		s.Storage.Pressure = s.Storage.Pressure || r.Storage.Pressure
		if days := r.Storage.DaysLeft; days > 0 && (s.Storage.DaysLeft == 0 || days < s.Storage.DaysLeft) {
			s.Storage.DaysLeft = days
		}
		for name, n := range r.Namespaces() {
			if namespace != "" && name != namespace {
				continue
			}
			for _, source := range n.Sources {
				s.Accepted += source.Accepted
				s.Rejected += source.Rejected
			}
			for d := range n.Destinations() {
				s.Delivered += d.Delivered
				s.Pending += d.Pending
				s.Retrying += d.Retrying
				s.DeadLetters += d.DeadLettersStored
			}
		}
	}
	if used, most := v.replication.stream(); most > 0 { // The disk of a process has a copy.
		s.Storage.UsedBytes, s.Storage.FreeBytes, s.Storage.TotalBytes, s.Storage.DaysLeft = used, max(0, most-used), most, 0
	}
	return s
}

const statusLong = `Shows whether Posthorn accepts calls, its storage, the number of calls and messages,
and the first problem of every object that has one. Exits 1 if something is wrong.
A Source that has never had a call is a notice.`

func newStatus() *cobra.Command {
	var d direct
	cmd := newStatusOf(&d.all, func(ctx context.Context) (*inventory, string, error) {
		v, err := d.inventory(ctx, d.scope())
		return v, d.scope(), err
	})
	cmd.Short = "Show a namespace on one screen: traffic, storage and all problems (standalone)"
	cmd.Example = "  posthorn status\n  posthorn status -A -o json | jq '.problems[].name'"
	command.AdminFlag(cmd, &d.admin)
	command.NamespaceFlag(cmd, &d.ns)
	return cmd
}

func newKubectlStatus(cluster *clusterConnector) *cobra.Command {
	var all bool
	cmd := newStatusOf(&all, func(ctx context.Context) (*inventory, string, error) {
		v, namespace, err := cluster.inventory(ctx, all)
		if err == nil {
			err = cluster.live(ctx, v.addLive)
		}
		return v, namespace, err
	})
	cmd.Short = "Show a namespace on one screen: traffic, storage and all problems"
	cmd.Example = "  kubectl posthorn status -n shop\n  kubectl posthorn status -A -o json | jq '.problems[].name'"
	return cmd
}

// newStatusOf makes a command status of the objects and the namespace ("" for all) that read returns.
func newStatusOf(all *bool, read func(context.Context) (*inventory, string, error)) *cobra.Command {
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:  "status",
		Long: statusLong,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := command.CheckAllNamespaces(cmd, *all, ""); err != nil {
				return err
			}
			v, namespace, err := read(cmd.Context())
			if err != nil {
				return err
			}
			s := v.state(namespace)
			if objects.Chosen() {
				if err := objects.Print(cmd.OutOrStdout(), s); err != nil {
					return err
				}
			} else {
				s.print(cmd.OutOrStdout())
			}
			if !s.Ready || s.Storage.Pressure || len(s.Problems) > 0 {
				return command.ErrFailed
			}
			return nil
		},
	}
	command.AllNamespacesFlag(cmd, all)
	command.ColorFlag(cmd)
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// maxShown bounds the problems, and the notices, that status prints.
const maxShown = 20

func (s *state) print(w io.Writer) {
	ready := "yes"
	switch {
	case !s.Ready:
		ready = "no, the config is not loaded yet"
	case s.Storage.Pressure:
		ready = "no, the disk is full"
	case len(s.Refusing) == s.Sources && s.Sources > 0:
		ready = "no, calls are answered 503"
	case len(s.Refusing) > 0:
		ready = "not all: 503 for Source " + strings.Join(s.Refusing[:min(len(s.Refusing), 3)], ", ")
	}
	const mib = 1 << 20
	fmt.Fprintf(w, "Accepts calls   %s\n", ready)
	if s.Replication != "" {
		fmt.Fprintf(w, "Replication     %s\n", s.Replication)
	}
	fmt.Fprintf(w, "Storage         %d MiB used, %d MiB free of %d MiB", s.Storage.UsedBytes/mib, s.Storage.FreeBytes/mib,
		s.Storage.TotalBytes/mib)
	if s.Storage.DaysLeft > 0 {
		fmt.Fprintf(w, ", full in %s at the present rate", plural.Count(s.Storage.DaysLeft, "day"))
	}
	fmt.Fprintf(w, "\nSources         %d; %s accepted, %d rejected\n", s.Sources, plural.Count(s.Accepted, "call"), s.Rejected)
	fmt.Fprintf(w, "Destinations    %d; %s delivered, %d pending (%s), %s stored\n", s.Destinations,
		plural.Count(s.Delivered, "message"), s.Pending, plural.Count(s.Retrying, "retry"), plural.Count(s.DeadLetters, "dead letter"))
	fmt.Fprintf(w, "Problems        %d", len(s.Problems))
	if s.namespace != "" {
		fmt.Fprint(w, " in namespace ", s.namespace)
	}
	if s.Elsewhere > 0 {
		fmt.Fprintf(w, ", %d in others", s.Elsewhere)
	}
	fmt.Fprintln(w)
	if len(s.Problems)+len(s.Notices) > 0 {
		fmt.Fprintln(w)
	}
	printTroubles(w, s.Problems, s.Notices, maxShown)
}
