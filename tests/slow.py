"""What `make test` has no time for and `make test-slow` runs; something smaller of the same kind stays in `make test`."""

from __future__ import annotations

__all__ = ["SAMPLED", "SLOW"]

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "test_autocast.py::test_as_accurate_as_eager": (
        "resnet",
        "vgg",
    ),
    "test_autocast.py::test_as_accurate_as_eager_where_all_is_smooth": (
        *("vgg-autocast fp16", "resnet-autocast bf16"),
        *("vgg-model fp16", "resnet-autocast fp16", "resnet-model bf16", "resnet-model fp16", "unet-autocast fp16", "unet-model bf16"),
    ),
    "test_autocast.py::test_bytes_and_flops": (
        *("resnet-fp16", "resnet-model bf16", "resnet-bf16, sparse states", "resnet-bf16, whole", "unet-fp16", "unet-model bf16"),
        *("unet-bf16, sparse states", "unet-bf16, whole", "mixed-fp16", "mixed-bf16, sparse states", "mixed-bf16, whole"),
    ),
    "test_axes.py::test_any_number_of_axes_is_exact": ("1-panels", "3-strips", "3-panels", "2-panels", "1-strips", "2-tiles"),
    "test_backend_networks.py::test_steps_are_exact_and_planned": (
        "eval norm",
        "strips, batch 2",
        "panels",
        "train norm",
        "u-net",
        "windows",
    ),
    "test_bands.py::test_every_split_of_four_ranks": ("4-False", "2-False", "1-False"),
    "test_bands.py::test_two_bands_equal_eager": (
        "vgg-norm",
        "vgg",
        "unet-bands",
        "unet",
    ),
    "test_chain_recompute.py::test_butts_algorithm_as_printed": ("100 layers",),
    "test_conv2d_kernels.py::test_interpreted_kernels": ("dilated", "strided", "pointwise", "dilated depthwise"),
    "test_dropout_triton.py::test_compiles_ahead_of_time": (
        *("dropout_kernel bf16 False element", "dropout_kernel fp32 True element", "dropout_kernel bf16 True channel"),
    ),
    "test_half_precision.py::test_as_accurate_as_eager": ("_channels--autocast bf16", "_volume--model fp16"),
    "test_inputs_cost.py::test_a_budget_below_the_image": ("False",),
    "test_kernels_compile.py::test_compiles_ahead_of_time": (
        *("conv2d 2", "conv2d 3", "conv2d 5", "data gradient 1", "data gradient 2", "weight gradient 1", "weight gradient 2"),
    ),
    "test_kernels_conv3d.py::test_interpreted_kernels": ("plain",),
    "test_mixed.py::test_auto_is_exact_at_every_budget_and_no_worse_than_its_parts": ("identity", "groupnorm", "unet"),
    "test_named_models.py::test_any_budget_is_exact_and_kept": ("unet-0.0", "vgg16-0.0", "vgg16_bn-0.3", "darknet19-0.3", "resnet50-0.1"),
    "test_named_models.py::test_any_tiling_is_exact": ("vgg16", "resnet18", "vgg16_bn", "darknet19", "resnet50"),
    "test_source_open.py::test_other_processes_read_zarr": ("spawn",),
    "test_streamed_model.py::test_streamed_weights_are_exact_to_the_byte": ("shared", "unet"),
    "test_tails.py::test_the_host_never_makes_a_plan_slower_and_lets_smaller_budgets_work": ("plain",),
    "test_training_models.py::test_three_steps_in_training_mode": (
        *(
            "vgg16_bn-panels",
            "resnet50-strips",
            "se_resnet18-panels",
            "se_resnet18-strips",
            "vgg16_bn-strips",
            "densenet-panels",
            "unet_batch_norm-strips",
            "unet_batch_norm-panels",
        ),
    ),
    "test_wsi_resume.py::test_a_run_killed_at_every_bad_moment_ends_in_the_same_bits": ("while computing", "between checkpoints"),
    "test_any_rank.py::test_every_budget_is_exact_and_holds": ("gpt-eval",),
    "test_backend_networks.py::test_each_group_equals_what_it_replaces": ("bfloat16",),
}

#: Tests without parameters.
_TESTS = (
    "test_bands.py::test_sums_of_gradients_in_many_windows",
    "test_bands_failure.py::test_ranks_that_are_asked_different_things",
    "test_planner.py::test_inference_needs_far_less_than_training",
    "test_any_rank.py::test_ids_alone_masks_and_other_sizes",
    "test_planner.py::test_a_gigapixel_image_fits_or_the_error_says_what_would",
    "test_tails.py::test_a_small_host_is_kept_to",
    "test_wsi_ranks.py::test_label_maps_are_dealt_out_and_shared",
    "test_wsi_ranks.py::test_replicas_take_the_steps_of_one_process",
    "test_wsi_ranks.py::test_running_statistics_are_those_of_the_first_replica",
    "test_wsi_ranks.py::test_two_replicas_of_two_bands_take_the_steps_of_one_process",
)

#: Tests by file, name and parameters.
SLOW = frozenset((*_TESTS, *(f"{test}[{parameter}]" for test, parameters in _PARAMETERS.items() for parameter in parameters)))

#: Tests of many cases that differ little: `make test` runs about one of so many, and each value of each parameter once at least;
#: `make test-slow` runs the others.
SAMPLED = {
    "test_checkpoints.py::test_few_slots_are_exact": 3,
    "test_dropout_kernel.py::test_blocks_do_not_show": 3,
    "test_dropout_kernel.py::test_module": 2,
    "test_exact_adaptive.py::test_adaptive_average": 2,
    "test_exact_operators.py::test_conv": 4,
    "test_exact_operators.py::test_joins_in_panels_and_tiles": 2,
    "test_exact_operators.py::test_panels_and_tiles": 16,
    "test_exact_operators.py::test_pool": 3,
    "test_exact_reductions.py::test_any_tiling_is_exact": 8,
    "test_exact_resampling.py::test_feature_pyramid_at_odd_sizes": 2,
    "test_exact_resampling.py::test_resampling_between_convolutions": 2,
    "test_exact_resampling.py::test_unet_at_odd_sizes": 2,
    "test_exact_shuffles.py::test_shuffles": 3,
    "test_exact_transposed.py::test_every_use": 4,
    "test_exact_transposed.py::test_no_product_is_computed_twice": 2,
    "test_exact_transposed.py::test_output_size_of_the_caller": 2,
    "test_exact_transposed.py::test_unet": 2,
    "test_footprint.py::test_working_bytes_are_near_the_programs_peak": 2,
    "test_functional.py::test_the_graph_is_that_of_the_long_way": 5,
    "test_inputs.py::test_every_kind_of_array": 2,
    "test_inputs_cost.py::test_the_closed_form_equals_the_phantom_walk": 2,
    "test_losses.py::test_losses_of_labels": 3,
    "test_losses.py::test_losses_of_masks": 2,
    "test_norms.py::test_any_tiling_is_exact": 2,
    "test_norms_more.py::test_any_tiling_is_exact": 8,
    "test_optim.py::test_the_same_bits_as_torch": 2,
    "test_profile.py::test_profile_equals_the_phantom_walk": 4,
    "test_recomputing.py::test_published_schedules_are_exact": 2,
    "test_sharded.py::test_each_rank_has_images_of_its_own": 2,
    "test_repeat.py::test_the_same_bits_as_eager_within_the_budget": 2,
    "test_streamed_steps.py::test_the_same_bits_as_torch": 3,
}
