package cli

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// A target is the admin API of one dispatcher.
type target struct {
	// pod is the pod's name; empty without a cluster.
	pod string
	*adminapi.Client
}

// explain adds the pod's name or a hint to an error of the target.
func (t target) explain(err error) error {
	if err == nil {
		return nil
	}
	if t.pod != "" {
		return fmt.Errorf("pod %s: %w", t.pod, err)
	}
	if _, ok := errors.AsType[*url.Error](err); ok {
		return fmt.Errorf("%w\nIs Posthorn running there? Start it with 'posthorn run', or set --admin", err)
	}
	return err
}

// stores returns the admin APIs of the slots that the dispatcher owns, or of its single store.
func (t target) stores(ctx context.Context) (list []target, err error) {
	slots, err := t.Slots(ctx)
	if err != nil {
		return nil, t.explain(err)
	}
	if slots == nil {
		return []target{t}, nil
	}
	for _, s := range slots {
		if s.Owner {
			list = append(list, target{t.pod, t.Slot(s.Slot)})
		}
	}
	return list, nil
}

// all returns the admin APIs of all slots of the log of the dispatcher, which forwards the requests to the owners, or
// of its single store.
func (t target) all(ctx context.Context) (list []target, err error) {
	slots, err := t.Slots(ctx)
	if err != nil || slots == nil {
		return []target{t}, t.explain(err)
	}
	r, err := t.Report(ctx, "")
	if err != nil {
		return nil, t.explain(err)
	}
	for slot := range r.Replication.Number {
		list = append(list, target{t.pod, t.Slot(slot)})
	}
	return list, nil
}

// connector connects to dispatchers and knows their namespace.
type connector interface {
	// connect finds the dispatchers; the caller runs closeAll.
	connect(ctx context.Context) (targets []target, closeAll func(), err error)
	// namespace returns the namespace that the user selected.
	namespace() (string, error)
	// names returns the names of the objects of a resource in that namespace.
	names(ctx context.Context, resource string) ([]string, error)
}

// completeDestination completes the first argument with the names of the destinations. The connector
// exists once the flags are registered.
func completeDestination(of func() connector) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := of().names(cmd.Context(), "webhookdestinations") // A completion has no place for an error.
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeObject completes the first argument as DESTINATION or KIND/NAME.
func completeObject(of func() connector) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		kind, _, hasKind := strings.Cut(typed, "/")
		if !hasKind {
			found, _ := of().names(cmd.Context(), "webhookdestinations")
			for _, kind := range kindNames {
				found = append(found, kind+"/")
			}
			return found, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
		resource, _, err := objectOf([]string{kind + "/x"})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		found, _ := of().names(cmd.Context(), resource)
		for i, name := range found {
			found[i] = kind + "/" + name
		}
		return found, cobra.ShellCompDirectiveNoFileComp
	}
}

// destinationArg returns the name of a destination that is given as NAME or KIND/NAME.
func destinationArg(arg string) (string, error) {
	resource, name, err := objectOf([]string{arg})
	if err == nil && resource != "webhookdestinations" {
		err = command.Usagef("%q is not a destination", arg)
	}
	return name, err
}

// connectorFlags registers a command's flags for a connector and returns the connector.
type connectorFlags func(cmd *cobra.Command) connector

// direct connects to one dispatcher by its address.
type direct struct {
	admin, ns string
	// all selects all namespaces.
	all bool
}

// scope returns the selected namespace; "" for all.
func (d *direct) scope() string {
	if d.all {
		return ""
	}
	return d.ns
}

// scopeFlags registers -n and -A.
func (d *direct) scopeFlags(cmd *cobra.Command) {
	command.NamespaceFlag(cmd, &d.ns)
	command.AllNamespacesFlag(cmd, &d.all)
}

func connectDirect(cmd *cobra.Command) connector {
	d := &direct{}
	command.AdminFlag(cmd, &d.admin)
	command.NamespaceFlag(cmd, &d.ns)
	return d
}

func (d *direct) namespace() (string, error) { return d.ns, nil }

func (d *direct) names(ctx context.Context, resource string) ([]string, error) {
	return d.namesIn(ctx, d.ns, resource)
}

func (d *direct) connect(ctx context.Context) ([]target, func(), error) {
	t, err := d.target()
	if err != nil {
		return nil, nil, err
	}
	targets, err := t.all(ctx)
	return targets, func() {}, err
}

// target returns the admin API at the address, which may lack a scheme.
func (d *direct) target() (target, error) {
	root := d.admin
	if !strings.Contains(root, "://") {
		root = "http://" + root
	}
	if _, err := url.Parse(root); err != nil {
		return target{}, command.Usagef("--admin %q: %v", d.admin, err)
	}
	return target{Client: &adminapi.Client{URL: root}}, nil
}
