# SPDX-License-Identifier: Apache-2.0
# bash completion for tundish: commands, options, and the words that an option takes

_tundish()
{
	local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words=
	local common='--help --help-all --usage'
	local header='--ignore-index --allow-trailing --max-header='
	local layout='--tp= --dp= --ep= --rank= --phase= --slice= --experts= --ep-placement= --ep-scales= --no-ep-filter
		--names= --draft-prefix= --skip= --rules= --budget= --rank-budget= --slab= --packing= --oversize= --align=
		--run-min='

	COMPREPLY=()
	if ((COMP_CWORD == 1)); then
		mapfile -t COMPREPLY < <(compgen -W \
			'inspect verify plan load doctor stat bench bridge --help --help-all --version' -- "$cur")
		return
	fi
	# "--phase=ta" arrives as three words because "=" breaks words.
	if [[ $cur == = ]]; then
		cur=
	elif [[ $prev == = ]]; then
		prev=${COMP_WORDS[COMP_CWORD - 2]}
	fi
	case $prev in
	--phase) words='all target draft' ;;
	--slice) words='auto none experts all' ;;
	--packing) words='name file' ;;
	--oversize) words='refuse pieces overrun' ;;
	--ep-placement) words='linear round_robin' ;;
	--ep-scales) words='owned all' ;;
	--on-full) words='wait fail overrun copy' ;;
	--on-dead | --on-lost) words='fail continue' ;;
	--numa) words='auto interleave' ;;
	--engine) words='auto uring threads' ;;
	--direct) words='auto on off' ;;
	--progress) words='auto always never' ;;
	--sort) words='name size offset' ;;
	--rules | --checksum | --report | --trace | --secret)
		mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		return
		;;
	esac
	if [[ -z $words && $command == bench && $cur != -* && $prev != --* ]]; then
		words=channel
	fi
	if [[ -z $words && $cur == -* ]]; then
		case $command in
		inspect) words="--filter= --sort= --json $header $common" ;;
		verify) words="--deep --json $header $common" ;;
		plan) words="--tensors --json $layout $header $common" ;;
		load) words="--keep --keep-touched --shared --no-shared --group= --members= --guest --evict= --checksum= --report= --trace=
			--json --progress= --progress-fd= --deadline= --engine= --direct= --keep-cache --threads= --cpus= --numa= --on-full=
			--on-dead= $layout $header $common" ;;
		doctor) words="--json $common" ;;
		stat) words="--watch --interval= --json --prometheus $common" ;;
		bench) words="--readers= --bytes= --objects= --rate= --max-bytes= --max-objects= --deadline= --json $common" ;;
		bridge) words="--from= --listen= --connect= --to= --max-bytes= --max-objects= --max-object-bytes= --readers=
			--places= --on-dead= --rank= --receivers= --on-lost= --grace= --deadline= --secret= $common" ;;
		esac
	fi
	if [[ -n $words ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
		[[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
	else
		mapfile -t COMPREPLY < <(compgen -f -- "$cur")
		compopt -o filenames
	fi
} && complete -F _tundish tundish
