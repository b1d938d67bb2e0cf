package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// resourceNames maps the names of kinds that users may type to resources.
var resourceNames = map[string]string{
	"source": "sources", "sources": "sources", "psrc": "sources",
	"destination": "webhookdestinations", "destinations": "webhookdestinations", "whd": "webhookdestinations", "pwhd": "webhookdestinations",
	"webhookdestination": "webhookdestinations", "webhookdestinations": "webhookdestinations",
	"audience": "audiences", "audiences": "audiences", "paud": "audiences",
	"deletionrequest": "deletionrequests", "deletionrequests": "deletionrequests", "deletions": "deletionrequests", "pdel": "deletionrequests",
	"redelivery": "redeliveries", "redeliveries": "redeliveries", "rdl": "redeliveries", "prdl": "redeliveries",
}

// kindNames are the names of the kinds in help and completion, in the order of "get all".
var kindNames = []string{"sources", "destinations", "audiences", "deletions", "redeliveries"}

// resourcesOf returns the resources of an argument like "sources,whd" or "all".
func resourcesOf(arg string) ([]string, error) {
	var found []string
	for word := range strings.SplitSeq(strings.ToLower(arg), ",") {
		words := []string{word}
		if word == "all" {
			words = kindNames
		}
		for _, word := range words {
			resource := resourceNames[word]
			if resource == "" {
				return nil, command.Usagef("%q is not one of %s or all%s", word, strings.Join(kindNames, ", "),
					command.DidYouMean(word, slices.Sorted(maps.Keys(resourceNames))))
			}
			if !slices.Contains(found, resource) {
				found = append(found, resource)
			}
		}
	}
	return found, nil
}

// getter prints objects of a Posthorn that runs without a cluster.
type getter struct {
	*direct
	cmd       *cobra.Command
	resources []string
	wanted    []string
	output    outputFormat
	noHeaders bool
	selector  string
	warned    map[string]bool
}

// outputFormat is the value of -o of get. It implements pflag.Value.
type outputFormat struct {
	text    string
	printer printers.ResourcePrinter
}

func (o *outputFormat) String() string { return o.text }
func (o *outputFormat) Type() string   { return "string" }

func (o *outputFormat) Set(text string) error {
	o.text, o.printer = text, nil
	template, isPath := strings.CutPrefix(text, "jsonpath=")
	switch {
	case text == "wide":
	case text == "name":
		o.printer = &printers.NamePrinter{}
	case text == "json":
		o.printer = &printers.JSONPrinter{}
	case text == "yaml":
		o.printer = &printers.YAMLPrinter{}
	case isPath && template != "":
		path, err := printers.NewJSONPathPrinter(template)
		if err != nil {
			return fmt.Errorf("the template is invalid: %w", err)
		}
		path.AllowMissingKeys(true)
		o.printer = path
	default:
		return fmt.Errorf("use wide, name, yaml, json or jsonpath=TEMPLATE")
	}
	return nil
}

func newGet() *cobra.Command {
	g := getter{direct: &direct{}, warned: map[string]bool{}}
	var watch bool
	cmd := &cobra.Command{
		Use:   "get KIND[,KIND...]|all [NAME...]",
		Short: "Show Sources, WebhookDestinations and objects of the other kinds with their status (standalone)",
		Long: `Prints the objects of a Posthorn that runs without a cluster, in the formats of
kubectl get. The kinds are sources, destinations, audiences, deletions and
redeliveries; all means all of them. With -o yaml or -o json it prints whole objects
with their status. With --watch it then prints each object again when it changes.`,
		Example: `  posthorn get destinations
  posthorn get sources,destinations -o wide
  posthorn get all -n shop
  posthorn get destination crm -o yaml
  posthorn get destination crm -o jsonpath='{.status.delivery.delivered}'
  posthorn get destinations --watch`,
		Args: func(_ *cobra.Command, args []string) (err error) {
			if len(args) == 0 {
				return command.Usagef("the kind is missing: all, or some of %s", strings.Join(kindNames, ","))
			}
			if g.resources, err = resourcesOf(args[0]); err != nil {
				return err
			}
			if g.wanted = args[1:]; len(g.wanted) > 0 && len(g.resources) > 1 {
				return command.Usagef("set one kind when you set the name %q", g.wanted[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			g.cmd = cmd
			if err := command.CheckAllNamespaces(cmd, g.all, strings.Join(g.wanted, " ")); err != nil {
				return err
			}
			if watch {
				return g.watch(cmd.Context())
			}
			return g.once(cmd.Context())
		},
	}
	cmd.ValidArgsFunction = g.complete
	f := cmd.Flags()
	command.AdminFlag(cmd, &g.admin)
	f.VarP(&g.output, "output", "o", "wide, name, yaml, json or jsonpath=TEMPLATE")
	g.scopeFlags(cmd)
	f.StringVarP(&g.selector, "selector", "l", "", "only objects with these labels, e.g. app=shop")
	f.BoolVar(&g.noHeaders, "no-headers", false, "print no header line")
	f.BoolVarP(&watch, "watch", "w", false, "print changes until interrupted")
	return cmd
}

// objects requests the selected objects of a resource. It fails if a named one does not exist.
func (g *getter) objects(ctx context.Context, resource, accept string, include string, each func([]byte) error) error {
	base := apiPrefix
	if !g.all {
		base += "/namespaces/" + url.PathEscape(g.ns)
	}
	base += "/" + resource
	query := url.Values{"labelSelector": {g.selector}, "includeObject": {include}}
	if len(g.wanted) == 0 {
		body, err := g.fetch(ctx, base+"?"+query.Encode(), accept)
		if err != nil {
			return err
		}
		return each(body)
	}
	var missing error
	for _, name := range g.wanted {
		body, err := g.fetch(ctx, base+"/"+url.PathEscape(name)+"?"+query.Encode(), accept)
		if isNotFound(err) { // The others are printed, as by kubectl.
			missing = errors.Join(missing, g.suggest(ctx, err, g.ns, resource, name))
			continue
		}
		if err != nil {
			return err
		}
		if err := each(body); err != nil {
			return err
		}
	}
	return missing
}

// remaining is the part of a warning that changes with the time alone.
var remaining = regexp.MustCompile(` in [0-9.hms]+, at `)

// fetch requests a path, and prints each warning of the responses once.
func (g *getter) fetch(ctx context.Context, path, accept string) ([]byte, error) {
	body, warnings, err := g.request(ctx, path, accept)
	for _, w := range warnings {
		if key := remaining.ReplaceAllString(w.Text, " at "); !g.warned[key] {
			g.warned[key] = true
			fmt.Fprintln(g.cmd.ErrOrStderr(), "Warning:", w.Text)
		}
	}
	return body, err
}

// suggest adds a similar name to the error of an object that does not exist.
func (d *direct) suggest(ctx context.Context, err error, namespace, resource, name string) error {
	if !isNotFound(err) {
		return err
	}
	names, failed := d.namesIn(ctx, namespace, resource)
	if failed != nil {
		return err
	}
	return fmt.Errorf("%w%s", err, command.DidYouMean(name, names))
}

// names returns the names of the objects of a resource in a namespace.
func (d *direct) namesIn(ctx context.Context, namespace, resource string) ([]string, error) {
	var list metav1.PartialObjectMetadataList
	if err := d.read(ctx, apiPrefix+"/namespaces/"+url.PathEscape(namespace)+"/"+resource, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, o := range list.Items {
		names = append(names, o.Name)
	}
	return names, nil
}

func isNotFound(err error) bool {
	status, ok := errors.AsType[*adminapi.StatusError](err)
	return ok && status.StatusCode == http.StatusNotFound
}

// once prints the objects.
func (g *getter) once(ctx context.Context) error {
	if g.output.printer != nil {
		list, missing := g.list(ctx)
		if missing != nil && len(list) == 0 {
			return missing
		}
		return cmp.Or(g.printObjects(list), missing)
	}
	printed := 0
	for _, resource := range g.resources {
		table, missing := g.table(ctx, resource)
		if len(table.Rows) == 0 {
			if missing != nil {
				return missing
			}
			continue
		}
		if printed > 0 {
			fmt.Fprintln(g.cmd.OutOrStdout())
		}
		printed += len(table.Rows)
		if err := g.printTable(table, resource, g.noHeaders); err != nil || missing != nil {
			return cmp.Or(err, missing)
		}
	}
	if printed == 0 {
		fmt.Fprintln(g.cmd.ErrOrStderr(), g.nothing())
	}
	return nil
}

// list returns the objects of all selected resources.
func (g *getter) list(ctx context.Context) ([]unstructured.Unstructured, error) {
	var all []unstructured.Unstructured
	for _, resource := range g.resources {
		err := g.objects(ctx, resource, "application/json", "", func(body []byte) error {
			object, _, err := unstructured.UnstructuredJSONScheme.Decode(body, nil, nil)
			if err != nil {
				return fmt.Errorf("the response is not an object: %w", err)
			}
			if list, ok := object.(*unstructured.UnstructuredList); ok {
				all = append(all, list.Items...)
			} else {
				all = append(all, *object.(*unstructured.Unstructured))
			}
			return nil
		})
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// printObjects prints one named object as it is, and others as one List, as kubectl does.
func (g *getter) printObjects(items []unstructured.Unstructured) error {
	if g.output.text == "name" {
		for i := range items {
			if err := g.output.printer.PrintObj(&items[i], g.cmd.OutOrStdout()); err != nil {
				return err
			}
		}
		return nil
	}
	if len(g.wanted) == 1 && len(items) == 1 {
		return g.printObject(&items[0])
	}
	values := make([]any, len(items))
	for i := range items {
		values[i] = items[i].Object
	}
	return g.printObject(&unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "List", "metadata": map[string]any{},
		"items": values}})
}

func (g *getter) printObject(o *unstructured.Unstructured) error {
	err := g.output.printer.PrintObj(o, g.cmd.OutOrStdout())
	if err == nil && strings.HasPrefix(g.output.text, "jsonpath=") && command.IsTerminal(g.cmd.OutOrStdout()) {
		fmt.Fprintln(g.cmd.OutOrStdout())
	}
	return err
}

// table returns the table of one resource.
func (g *getter) table(ctx context.Context, resource string) (*metav1.Table, error) {
	var all metav1.Table
	err := g.objects(ctx, resource, "application/json;as=Table;v=v1;g=meta.k8s.io", "Metadata", func(body []byte) error {
		var table metav1.Table
		if err := json.Unmarshal(body, &table); err != nil {
			return fmt.Errorf("the response is not a table: %w", err)
		}
		all.TypeMeta, all.ColumnDefinitions = table.TypeMeta, table.ColumnDefinitions
		all.Rows = append(all.Rows, table.Rows...)
		return nil
	})
	for i := range all.Rows {
		var m metav1.PartialObjectMetadata
		if json.Unmarshal(all.Rows[i].Object.Raw, &m) == nil {
			all.Rows[i].Object.Object = &m
		}
	}
	return &all, err
}

func (g *getter) printTable(table *metav1.Table, resource string, noHeaders bool) error {
	options := printers.PrintOptions{Wide: g.output.text == "wide", WithNamespace: g.all, NoHeaders: noHeaders}
	if len(g.resources) > 1 {
		// Rows of several kinds have the kind in front of the name, as kubectl prints them.
		options.WithKind = true
		options.Kind.Group, options.Kind.Kind = "posthorn.dev", strings.TrimSuffix(resource, "s")
		if resource == "redeliveries" {
			options.Kind.Kind = "redelivery"
		}
	}
	return printers.NewTablePrinter(options).PrintObj(table, g.cmd.OutOrStdout())
}

// watchInterval is the time between two requests of get --watch.
const watchInterval = time.Second

// watch prints the objects, and then those that changed, until ctx is done.
func (g *getter) watch(ctx context.Context) error {
	known := map[string]string{}
	for first := true; ; first = false {
		var err error
		if g.output.printer != nil {
			err = g.changedObjects(ctx, known)
		} else {
			err = g.changedRows(ctx, known, first)
		}
		if ctx.Err() != nil {
			return nil // Ctrl-C is the usual end.
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}

// changedObjects prints the objects that differ from the known ones.
func (g *getter) changedObjects(ctx context.Context, known map[string]string) error {
	items, err := g.list(ctx)
	if err != nil {
		return err
	}
	for i := range items {
		o := &items[i]
		text, err := json.Marshal(o.Object)
		if err != nil {
			return err
		}
		key := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
		if known[key] == string(text) {
			continue
		}
		known[key] = string(text)
		if err := g.output.printer.PrintObj(o, g.cmd.OutOrStdout()); err != nil {
			return err
		}
	}
	return nil
}

// changedRows prints the rows that differ from the known ones. Ages do not count as a difference.
func (g *getter) changedRows(ctx context.Context, known map[string]string, first bool) error {
	for _, resource := range g.resources {
		table, err := g.table(ctx, resource)
		if err != nil {
			return err
		}
		table.Rows = slices.DeleteFunc(table.Rows, func(row metav1.TableRow) bool {
			m, _ := row.Object.Object.(*metav1.PartialObjectMetadata)
			if m == nil {
				return false
			}
			var cells []any
			for i, c := range row.Cells {
				if i < len(table.ColumnDefinitions) && !isAge(table.ColumnDefinitions[i]) {
					cells = append(cells, c)
				}
			}
			key, now := resource+" "+m.Namespace+"/"+m.Name, fmt.Sprint(cells...)
			same := known[key] == now
			known[key] = now
			return same
		})
		if len(table.Rows) == 0 {
			continue
		}
		if err := g.printTable(table, resource, g.noHeaders || !first && len(g.resources) == 1); err != nil {
			return err
		}
	}
	return nil
}

// isAge reports whether the cells of a column change with the time alone.
func isAge(c metav1.TableColumnDefinition) bool {
	return c.Type == "date" || c.Format == "date" || c.Name == "Age" || strings.HasPrefix(c.Name, "Last ")
}

// complete completes kinds, and then names.
func (g *getter) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return append([]string{"all"}, kindNames...), cobra.ShellCompDirectiveNoFileComp
	}
	resources, err := resourcesOf(args[0])
	if err != nil || len(resources) != 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names, _ := g.namesIn(cmd.Context(), g.ns, resources[0])
	return slices.DeleteFunc(names, func(name string) bool { return slices.Contains(args[1:], name) }), cobra.ShellCompDirectiveNoFileComp
}

// nothing is printed when there is no object.
func (g *getter) nothing() string {
	if g.all {
		return "No resources found."
	}
	return fmt.Sprintf("No resources found in namespace %s; -A shows all namespaces.", g.ns)
}

// resource requests a path of the resources that posthorn run serves, and prints the warnings of
// the response.
func (d *direct) resource(cmd *cobra.Command, path, accept string) ([]byte, error) {
	body, warnings, err := d.request(cmd.Context(), path, accept)
	for _, w := range warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "Warning:", w.Text)
	}
	return body, err
}

// read requests a path of the resources that posthorn run serves, and decodes the response.
func (d *direct) read(ctx context.Context, path string, into any) error {
	body, _, err := d.request(ctx, path, "application/json")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func (d *direct) request(ctx context.Context, path, accept string) ([]byte, []utilnet.WarningHeader, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	t, err := d.target()
	if err != nil {
		return nil, nil, err
	}
	resp, err := t.Get(ctx, path, accept)
	if err != nil {
		return nil, nil, t.explain(err)
	}
	defer resp.Body.Close()
	warnings, _ := utilnet.ParseWarningHeaders(resp.Header.Values("Warning"))
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResourceBytes))
	return body, warnings, err
}

// maxResourceBytes bounds the bytes read of a response.
const maxResourceBytes = 64 << 20
